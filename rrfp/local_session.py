"""All ranks of a pipeline as threads of this process."""

import logging
import queue
import secrets
import threading
import time
import weakref

import torch

from rrfp import _C
from rrfp.agreement import decide
from rrfp.device import (
    LocalStreams,
    devices_by_rank,
    end_side_by_side,
    make_local_device_runtimes,
    refuse_shared_draws,
)
from rrfp.errors import error_from_status
from rrfp.idle_spin import idle_spin
from rrfp.modes import CallerModes
from rrfp.report import step_result
from rrfp.session import Session, leave_running
from rrfp.settings import SETTINGS
from rrfp.step_guard import rows
from rrfp.task_rng import shared_state
from rrfp.turn_trial import TurnTrial
from rrfp.value_text import class_name, error_text
from rrfp.worker import Worker

logger = logging.getLogger("rrfp")

_INTERRUPTED_LOOK_S = 0.01


class LocalSession(Session):
    """All ranks are threads of this process."""

    shares_process = True

    def __init__(self, layout, devices):
        super().__init__(layout, devices)
        self._has_warned_of_draws = False
        self._runtimes, self._workers, self._streams = [], [], None
        self._turns = None  # a TurnTrial; none on GPUs, whose threads only launch
        if devices is None:
            runtimes = _C.make_local_runtimes(
                layout.num_ranks, secrets.randbits(63), *idle_spin(layout.num_ranks)
            )
            self._turns = TurnTrial(layout.num_ranks)
        else:
            by_rank = devices_by_rank(layout, devices)
            runtimes = make_local_device_runtimes(by_rank, secrets.randbits(63))
            self._streams = LocalStreams(by_rank)
        self._runtimes = runtimes  # which the end of the program may close and take at once
        try:
            self._workers = [Worker(f"rrfp-rank{rank}") for rank in range(layout.num_ranks)]
            # Ctrl-C may come when it is made and nobody has it yet.
            for worker in self._workers:
                weakref.finalize(self, worker.let_go).atexit = False
            for worker in self._workers:
                worker.start()
        except BaseException:
            self.close("its set-up was interrupted")
            raise
        logger.info("%d ranks in one process, joined through %s, version %s, torch %s",
                    layout.num_ranks, runtimes[0].transport_name,
                    _C.build_info()["version"], torch.__version__)

    def _run(self, modules, request):
        decision = decide(request, [self._view(modules, request)], self.layout)
        decision = self._guarded(decision)
        if self.devices is not None:
            refuse_shared_draws(modules, self.layout.rank_of_stage, self.devices)
        modes = CallerModes(request.forward_only)
        launchers = [None] * len(self._runtimes)
        if self._streams is not None:
            launchers = self._streams.launchers(request.lookahead)
        rank_steps = [
            self._rank_step(runtime, modules, request, decision, modes, launcher)
            for runtime, launcher in zip(self._runtimes, launchers)
        ]
        self._refuse_closed()  # by another thread: it may have taken the runtimes
        state = shared_state()
        kind = (request.forward_only, decision.split_backward, decision.num_microbatches)
        takes_turns = self._turns is not None and self._turns.choose(kind)
        if self._turns is not None:
            rank_steps[0].runtime.take_turns(takes_turns)
        try:
            self._step += 1
            self.counter += 1
            for launcher in filter(None, launchers):
                launcher.fork()
            began = time.perf_counter()
            errors = self._run_side_by_side(rank_steps)
        except BaseException:
            self.close("its last step was interrupted")  # it has been counted, and not run
            raise
        finally:
            for rank_step in rank_steps:
                if rank_step.launcher is not None:
                    rank_step.launcher.join()
        self._check_not_drawn(state)
        if errors:
            self._raise_first(rank_steps, errors)
        if self._turns is not None:
            num_tasks = sum(len(rank_step.records) for rank_step in rank_steps)
            self._turns.learn(kind, takes_turns, time.perf_counter() - began, num_tasks)
        self._tied.add_up()
        for rank_step in rank_steps:
            self._learn(rank_step, decision)
        if decision.gathers_times:
            taken = [rows(rank_step) for rank_step in rank_steps]
            self._guard.learn(self._unguarded_plan, decision.costs, taken)
        return step_result(rank_steps, self.layout, request, decision)

    def _own_runtimes(self):
        return self._runtimes

    def _check_not_drawn(self, state):
        """Say once if numbers came from torch's own generator, which the ranks here share."""
        if not self._has_warned_of_draws and not torch.equal(state, shared_state()):
            self._has_warned_of_draws = True
            logger.warning(
                "torch's default generator was used while stages ran. If a stage drew from it "
                "past rrfp (a C++ extension may), its numbers depend on timing, and a "
                "checkpointed stage may recompute with others: use one process per rank. If "
                "another thread of yours did (loading data), all is well."
            )

    def _run_side_by_side(self, rank_steps):
        """Run every rank; interruptible. The exceptions of those that ended early.

        Whoever is interrupted here has a session to close.
        """
        errors = []
        finished = queue.SimpleQueue()
        try:
            for worker, rank_step in zip(self._workers, rank_steps):
                worker.submit(rank_step, finished)
            for _ in rank_steps:
                error = finished.get().pop()
                if error is not None:
                    errors.append(error)
                    if not isinstance(error, _C.StatusError):
                        said = f"{class_name(error)}: {error_text(error)}"
                        self._abort(_C.StatusCode.CLOSED, f"a worker ended with {said}")
        except BaseException:
            # Ctrl-C: the tasks that run now are waited for; another Ctrl-C leaves them alone.
            self._abort(_C.StatusCode.INTERRUPTED, "the step was interrupted")
            while not all(worker.is_idle for worker in self._workers):
                time.sleep(_INTERRUPTED_LOOK_S)
            raise
        return errors

    def _abort(self, code, message):
        for runtime in self._runtimes:
            runtime.abort(code, runtime.rank, message)

    def _raise_first(self, rank_steps, errors):
        own_bug = next((e for e in errors if not isinstance(e, _C.StatusError)), None)
        report = self._describe()
        self.close("its last step ended with an error")
        if own_bug is not None:
            raise own_bug
        first = errors[0]
        cause = next(
            (r.stage_error for r in rank_steps if r.runtime.rank == first.origin_rank), None
        )
        raise error_from_status(first.code, first.origin_rank, first.message, report) from cause

    def _end(self):
        if self._user is not None:
            self._abort(_C.StatusCode.CLOSED, self.closed_because)
            if any(worker.thread is threading.current_thread() for worker in self._workers):
                self._is_half_closed = True  # a stage closed it: who called its step does the rest
                return
        end_s = time.monotonic() + SETTINGS.close_timeout_s  # of all together
        for worker in self._workers:
            worker.close(0)
        ended = [worker.close(max(0, end_s - time.monotonic())) for worker in self._workers]
        if not all(ended):
            logger.warning("a stage is still running while its pipeline is closed")
            if self._user in (None, threading.get_ident()):
                leave_running(self)  # its thread still uses the runtime
            else:
                self._is_half_closed = True  # whose step it is does the rest when the stage ends
            return
        if self._streams is not None:
            end_side_by_side(self._runtimes, int(1000 * SETTINGS.close_timeout_s))
        else:
            for runtime in self._runtimes:
                runtime.close(0)
        self._runtimes = []
