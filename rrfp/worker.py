"""The loop that runs a rank's tasks, and the threads it runs on in one process."""

import contextlib
import dis
import logging
import os
import queue
import sys
import threading
import traceback

import torch

from rrfp import _C
from rrfp.boundary import Parcel, decode, encode
from rrfp.errors import ClosedError, stage_failure_text

logger = logging.getLogger("rrfp")

_OWN_FOLDER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "")

# Upper bound of one wait in the core; it looks for signals several times a second anyway.
_CLAIM_TIMEOUT_MS = 60_000


class RankStep:
    """One rank in one step: the plan, its stages and the runtime that says what comes next.

    ``launcher`` is how a rank with a GPU launches its tasks, None on the CPU.
    """

    def __init__(
        self, runtime, plan, layout, stage_steps, modes, random, step, stall_timeout_ms,
        launcher, held_bytes=None,
    ):
        self.runtime = runtime
        self.plan = plan
        self.stage_steps = stage_steps  # by stage
        self.modes = modes
        self.random = random
        self.step = step
        self.stall_timeout_ms = stall_timeout_ms
        self.launcher = launcher
        self.held_bytes = held_bytes  # None: nobody counts them
        self._shared_parcels = launcher and launcher.shared_parcels
        self.times = None
        self.records = None
        self.stage_error = None  # the exception of a stage of this rank
        self._process = os.getpid()
        self._shares_memory_with = {  # stages that take what is posted as it is
            stage
            for stage, rank in enumerate(layout.rank_of_stage)
            if rank == runtime.rank or runtime.shares_address_space
        }

    def run(self, other_thread):
        """Run every task of the step.

        Raises:
            StatusError: The step ended early, here or elsewhere; every rank has been told.
        """
        runtime, launcher = self.runtime, self.launcher
        with (
            self.modes.adopted(other_thread),
            launcher or contextlib.nullcontext(),
            self.random.active(),  # of the launcher's device
        ):
            if launcher is not None:
                launcher.begin(runtime)
            runtime.begin_step(self.plan, self.step, self.stall_timeout_ms)
            tasks = self.plan.tasks(runtime.rank)
            self.random.prepare(tasks)
            while True:
                local = runtime.claim(_CLAIM_TIMEOUT_MS)
                if local >= 0:
                    try:
                        if torch.autograd.profiler._is_profiler_enabled:
                            with _profiler_range(*tasks[local]):
                                self._run_task(local, *tasks[local])
                        else:
                            self._run_task(local, *tasks[local])
                    except BaseException as error:
                        self._end_if_forked(error)
                        if isinstance(error, (_C.StatusError, KeyboardInterrupt)):
                            raise
                        self._end_everywhere(tasks[local], error)
                        continue  # claim() raises what ended the step
                    if launcher is not None:
                        launcher.launched(runtime, tasks[local], self.stall_timeout_ms)
                    runtime.retire(local)
                elif local == _C.ALL_CLAIMED:
                    break
        self.times = runtime.end_step()
        self.records = runtime.records()

    def _run_task(self, local, stage, kind, microbatch):
        runtime = self.runtime
        parcels = runtime.take_inputs(local)
        if kind != "F":
            del parcels[0]  # the stage's own F or I, which sends nothing
        for index, parcel in enumerate(parcels):
            if type(parcel) is not Parcel:
                shared = self._shared_parcels and self._shared_parcels.take(
                    parcel, self.launcher.stream
                )
                parcels[index] = shared or decode(parcel)
            del parcel
        self.random.begin(kind, stage, microbatch)
        targets, results = self.stage_steps[stage].run(kind, microbatch, parcels)
        self._end_if_forked(None)
        if self.launcher is not None:
            self.launcher.refuse_other_stream(stage)
        for target, result in zip(targets, results, strict=True):
            if target in self._shares_memory_with:
                runtime.post_object(local, target, result)
            else:
                shared = self._shared_parcels and self._shared_parcels.post(result)
                runtime.post_tensors(local, target, *(shared or encode(result)))

    def _end_if_forked(self, error):
        """End a child that a stage forked and did not leave by ``os._exit``: this is its only
        thread, nobody hears what becomes of the step there, and what ranks share is its parent's.
        """
        if os.getpid() == self._process:
            return
        code = error.code if isinstance(error, SystemExit) else error
        try:
            if isinstance(code, BaseException):
                traceback.print_exception(code)
            sys.stderr.flush()
            sys.stdout.flush()
        finally:  # whatever the child has made of these
            os._exit(code & 0xFF if isinstance(code, int) else 0 if code is None else 1)

    def _end_everywhere(self, task, error):
        """Tell every rank that a task raised an exception."""
        stage, kind, microbatch = task
        name = f"{stage}{kind}{microbatch}"
        # The class is the user's: what it makes of its own attributes must not hide the failure.
        frames = BaseException.__traceback__.__get__(error)
        logger.debug("%s raised\n%s", name, _traceback_text(error, frames))
        frames = _from_users_code(frames)
        self.stage_error = BaseException.with_traceback(error, frames)
        traceback_text = _traceback_text(error, frames)
        text = stage_failure_text(
            name, error, traceback_text, self.stage_steps[stage].failed_on if kind == "F" else None,
        )
        self.runtime.abort(_C.StatusCode.STAGE_FAILED, self.runtime.rank, text)


def _traceback_text(error, frames):
    try:
        return "".join(traceback.format_exception(error))
    except Exception as broken:
        return ("Traceback (most recent call last):\n" + "".join(traceback.format_tb(frames)) +
                f"{type(error).__name__}, whose description raised {type(broken).__name__}\n")


def _from_users_code(frames):
    """A traceback without the frames of rrfp that it begins with.

    Where it has no others: None for what rrfp itself raises about a stage or loss_fn, which says
    all in words; whole for the rest, such as a bug of rrfp.
    """
    rest = last = frames
    while rest is not None and rest.tb_frame.f_code.co_filename.startswith(_OWN_FOLDER):
        rest, last = rest.tb_next, rest
    if rest is None and _is_at_raise(last):
        return None
    return rest or frames


def _is_at_raise(frame):
    """Whether it raised the error itself: no call and no operation of it failed."""
    return frame.tb_frame.f_code.co_code[frame.tb_lasti] == dis.opmap["RAISE_VARARGS"]


def _profiler_range(stage, kind, microbatch):
    """A range of torch.profiler named by the task.

    Not by its text alone: torch takes "2F0" for a mangled name of C++, and shows "F0".
    """
    return torch.profiler.record_function(f"rrfp {stage}{kind}{microbatch}")


def _answer_closed(finished):
    finished.put([ClosedError("this pipeline was closed while a step began. Build a new one.")])


class Worker:
    """A persistent thread that runs the steps of one rank, from start() to close()."""

    # No locks: a signal's handler may close a pipeline while its thread is in here.

    def __init__(self, name):
        self._jobs = queue.SimpleQueue()
        self._is_closed = False  # what is submitted from then on is answered without being run
        self._num_submitted = 0  # written by those who submit, one at a time
        self._num_answered = 0  # written by the thread
        self.thread = threading.Thread(target=self._serve, name=name, daemon=True)

    def start(self):
        """Apart from the making: who is interrupted here still has what to close."""
        self.thread.start()

    def submit(self, rank_step, finished):
        """Run a step; ``finished`` (a queue) gets [exception or None], which the taker empties.

        By then nothing of the step is held here: the taker may be the last to know its stages.
        """
        if self._is_closed:
            _answer_closed(finished)
            return
        self._jobs.put((rank_step, finished))
        self._num_submitted += 1  # last: a Ctrl-C between the two hides a step, makes none up
        if self._is_closed:  # meanwhile: the thread may have ended before it came to this job
            self._answer_left()

    def _answer_left(self):
        """Answer the jobs that the thread has not taken, each of which one of the two takes."""
        ends = False
        while True:
            try:
                job = self._jobs.get_nowait()
            except queue.Empty:
                break
            if job is None:
                ends = True
            else:
                self._num_submitted -= 1
                _answer_closed(job[1])
        if ends:
            self._jobs.put(None)

    def let_go(self):
        """End the thread once it is idle. Takes no lock: the garbage collector may call it."""
        self._jobs.put(None)

    @property
    def is_idle(self):
        """Whether all that was submitted has been answered."""
        return self._num_submitted <= self._num_answered

    def close(self, timeout_s):
        """End the thread once its step is over; whether it ended in time."""
        self._is_closed = True
        self._jobs.put(None)
        if self.thread is not threading.current_thread() and self.thread.ident is not None:
            self.thread.join(timeout_s)
        return not self.thread.is_alive()

    def _serve(self):
        while True:
            job = self._jobs.get()
            if job is None:
                return
            rank_step, finished = job
            del job
            error = None
            try:
                rank_step.run(other_thread=True)
            except BaseException as caught:
                error = caught
            answer = [error]
            del rank_step, error
            finished.put(answer)
            self._num_answered += 1
            del finished, answer
