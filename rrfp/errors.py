"""What can end a step. Every error is raised on every rank, with the same words.

Wrong arguments are ``ValueError`` or ``TypeError`` before any task runs, and leave the pipeline
usable. The errors here come from a step that had begun, or from setting up: the pipeline is
closed, parameters are untouched, and ``.grad`` may hold a part of the step.
"""

from rrfp import _C
from rrfp.value_text import class_name, error_text


class RrfpError(RuntimeError):
    """Base of all errors of a pipeline.

    Attributes:
        rank: The pipeline rank it is about, that of a linked pipeline where the message says that
            a member of the agreement group said so; None where no one rank is.
        stage: The stage it is about, or None.
        task: The task it is about as a text such as ``"2F0"``, or None.
        report: What each rank was doing when the step ended, with its last decisions, as
            ``Pipeline.dump(as_json=True)`` has it; None where no step had begun.
    """

    def __init__(self, message, *, rank=None, stage=None, task=None, report=None):
        super().__init__(message)
        self.rank = rank
        self.stage = stage
        self.task = task
        self.report = report


class StageError(RrfpError):
    """A stage, the loss function or a hook raised an exception.

    On the rank where it happened the exception itself is chained (``__cause__``). The next
    ``run_pipeline`` builds the pipeline anew.

    Attributes:
        original_traceback: The traceback of the exception, as text, on every rank; without the
            frames of rrfp that called the stage, which logger ``rrfp`` has at level DEBUG. It has
            no frames, and the message leaves it out, where rrfp refuses what a stage or the loss
            function returned.
    """

    def __init__(self, message, *, original_traceback="", **where):
        super().__init__(message, **where)
        self.original_traceback = original_traceback


class PeerLostError(RrfpError):
    """A process of the pipeline died or fell silent. The process group must be rebuilt."""


class StallError(RrfpError):
    """Nothing could run anywhere for ``stall_timeout_s``; says what each rank waits for."""


class ProtocolError(RrfpError):
    """A member of the run sent something malformed; a bug in rrfp or two versions of it."""


class InterruptedStepError(RrfpError):
    """Another rank got Ctrl-C (SIGINT) in a step; that rank raises KeyboardInterrupt.

    SIGTERM ends a process where no handler is set, so the others raise ``PeerLostError``; with
    ``signal.signal(signal.SIGTERM, signal.default_int_handler)`` it is as Ctrl-C.
    """


class ClosedError(RrfpError):
    """The pipeline was closed, here or by another rank, while it was needed.

    The end of a rank's script, also by an exception between two steps, closes its pipelines.
    """


class RankTimeoutError(RrfpError):
    """A rank did not enter the step, or the set-up, in time; the message names it."""


class DeviceError(RrfpError):
    """A CUDA or NCCL call gave an error, which the message names."""


class TaskError(RrfpError):
    """A task of a ``Scheduler`` raised an exception, which is chained (``__cause__``).

    Tasks that ran meanwhile have ended, the others were not begun; the scheduler is usable.
    """


_BY_CODE = {
    _C.StatusCode.PEER_LOST: PeerLostError,
    _C.StatusCode.STALLED: StallError,
    _C.StatusCode.PROTOCOL: ProtocolError,
    _C.StatusCode.INTERRUPTED: InterruptedStepError,
    _C.StatusCode.CLOSED: ClosedError,
    _C.StatusCode.TIMED_OUT: RankTimeoutError,
    _C.StatusCode.DEVICE_FAILED: DeviceError,
}

_KIND_WORDS = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient"}

# A traceback travels as the metadata of one message, which is bounded.
_MAX_TRACEBACK_CHARS = 64 * 1024


def stage_failure_text(task, error, traceback_text, context=None):
    """The message of a STAGE_FAILED status: task, one line of error, one of context, traceback.

    ``context`` says what the stage was called with; None: nothing. The inverse is in
    ``error_from_status``.
    """
    kept = traceback_text[-_MAX_TRACEBACK_CHARS:]
    line = " ".join(f"{class_name(error)}: {error_text(error)}".split())[:2000]
    # File names that are no UTF-8 leave lone surrogates in a text, which cannot travel.
    context = " ".join((context or "").split())[:2000]
    return f"{task}\n{line}\n{context}\n{kept}".encode("utf-8", "replace").decode()


def _stage_error(rank, message, report):
    task, line, context, traceback_text = (message.split("\n", 3) + ["", "", ""])[:4]
    try:
        stage, kind, microbatch = _C.parse_task(task)
        where = f"{task} (stage {stage}, {_KIND_WORDS[kind]} of microbatch {microbatch})"
    except ValueError:
        stage, where = None, task
    return StageError(
        f"rank {rank} failed in {where}: {line}\n"
        + (f"{context}\n" if context else "") +
        "The pipeline is closed and the next run_pipeline builds it anew; parameters are "
        "untouched, .grad may hold a part of this step."
        + (f"\nOriginal traceback, on rank {rank}:\n{traceback_text.rstrip()}"
           if "Traceback (" in traceback_text else ""),
        rank=rank,
        stage=stage,
        task=task,
        original_traceback=traceback_text,
        report=report,
    )


def error_from_status(code, origin_rank, message, report=None):
    """The exception for a status of the core, with what the ranks were doing then."""
    rank = origin_rank if origin_rank >= 0 else None
    if code == _C.StatusCode.STAGE_FAILED:
        return _stage_error(rank, message, report)
    return _BY_CODE.get(code, RrfpError)(message, rank=rank, report=report)
