"""Sessions: the ranks of this process, set up once and used every step.

A session holds no module: it is kept by ``Pipeline`` and by the cache behind ``run_pipeline``,
and must not keep a model alive.
"""

import atexit
import logging
import os
import queue
import secrets
import threading
import weakref

import torch

from rrfp import _C
from rrfp.activations import ActivationMemory, HeldBytes
from rrfp.agreement import decide
from rrfp.cost_watch import CostWatch
from rrfp.device import (
    LocalStreams,
    devices_by_rank,
    end_side_by_side,
    make_local_device_runtimes,
    refuse_shared_draws,
)
from rrfp.dump import describe_ranks, dump_json, dump_text, install_handler
from rrfp.errors import ClosedError, RrfpError, error_from_status
from rrfp.idle_spin import idle_spin
from rrfp.leaf_gradients import HookWatch
from rrfp.modes import CallerModes
from rrfp.moved_stages import moved_stages
from rrfp.report import step_result
from rrfp.settings import SETTINGS
from rrfp.split_backward import SplitMemory
from rrfp.stage import LossRule, StageStep
from rrfp.stage_traits import TraitsMemory
from rrfp.step_guard import StepGuard, rows
from rrfp.task_rng import StepRandom, shared_state
from rrfp.tied import TiedStep
from rrfp.worker import RankStep, Worker

logger = logging.getLogger("rrfp")

_open_sessions = weakref.WeakSet()
# Never closed and never collected: in a forked child, and where a stage would not end.
_abandoned_sessions = []
_forked_from_owner = False
_MAX_PLANS = 16


def open_sessions():
    """Those of this process that are not closed."""
    return list(_open_sessions)


class Session:
    """What local and process sessions share: plans, stage steps, results, closing.

    Attributes:
        shares_process: Whether ranks are threads of this process, beside others.
        is_grouped: Whether this rank is a member of an agreement group.
        devices: ``{stage: device}`` of the stages that live here, None on the CPU.
        launch_note: To tell who gave too little, where other processes run pipelines beside.
    """

    shares_process = False
    is_grouped = False
    launch_note = ""

    def __init__(self, layout, devices):
        self.layout = layout
        self.devices = devices
        self.waits = True  # hint "auto" may wait for announced tasks
        self.closed_because = None
        self._plans = {}
        self._step = 0
        self.counter = 0  # steps run, as random numbers count them; a state_dict may set it
        self._traits = TraitsMemory()
        self._activations = ActivationMemory()
        # Threads of one process may add to the same parameter; the engine has a lock for that.
        alone = layout.num_ranks == 1 or not self.shares_process
        watch = HookWatch() if alone else None
        self._split_memories = {stage: SplitMemory(watch) for stage in range(layout.num_stages)}
        self._cost_watch = CostWatch(on_gpus=devices is not None)
        self._guard = StepGuard(layout)
        self._unguarded_plan = None  # of the current step, on the rank that decides
        self._tied = None  # a TiedStep, of the current step
        self._in_step = threading.Lock()
        self._user = None  # the thread that uses the runtime now
        _open_sessions.add(self)
        install_handler(dump_all)

    def run(self, modules, request):
        """Run one step of ``{stage: module}`` as the request asks.

        Raises:
            ValueError: Wrong arguments; nothing was run and the session is usable.
            RrfpError: The step ended early; the session is closed.
        """
        if self.closed_because is not None:
            raise ClosedError(f"this pipeline is closed: {self.closed_because}. Build a new one.")
        if not self._in_step.acquire(blocking=False):
            raise RrfpError("a step of this pipeline is running in another thread; wait for it.")
        self._user = threading.get_ident()
        try:
            with TiedStep(self.layout.tied, modules, request.forward_only) as self._tied:
                result = self._run(modules, request)
                self._cost_watch.look(result.report, request.forward_only)
                return result
        finally:
            self._tied = self._user = None
            self._in_step.release()

    def refuse(self, error, timeout_s):
        """This rank's arguments are wrong: tell the other ranks, if there are any elsewhere."""

    def dump(self, as_json):
        if self.closed_because is not None:
            raise ClosedError(f"this pipeline is closed: {self.closed_because}. Build a new one.")
        description = self._describe()
        return dump_json(description) if as_json else dump_text(description)

    def _describe(self):
        return describe_ranks(self._own_runtimes(), in_one_process=self.shares_process)

    def close(self, reason="close() was called"):
        """End the session; more than once is fine."""
        if self.closed_because is None:
            self.closed_because = reason
            _open_sessions.discard(self)
            self._end()
            self._guard.wait(SETTINGS.close_timeout_s)

    def _view(self, modules, request):
        """What this process tells the other ranks about the step it asks for."""
        view = request.view()
        view["counter"] = self.counter
        # Members of an agreement group decide alike only by what all were given.
        view["held"] = None if self.is_grouped else self._activations.known()
        view["moved"] = moved_stages(modules, self.devices)
        # Nothing can be read on a device without memory; the step is refused anyway.
        view["tied"] = {} if view["moved"] else self._tied.samples()
        view["traits"] = {}
        if request.deterministic:
            view["traits"] = {s: self._traits.traits(s, m) for s, m in modules.items()}
        return view

    def _learn(self, rank_step, decision):
        """Remember for later steps what a training step showed about a rank's stages."""
        if rank_step.held_bytes is not None:
            self._activations.learn(rank_step.held_bytes, decision.costs)
        for stage_step in rank_step.stage_steps.values():
            if stage_step.buffers is not None and not stage_step.forward_only:
                is_fused = stage_step.fused_because is not None
                self._traits.learn(
                    stage_step.stage,
                    is_fused if is_fused or stage_step.has_split else None,
                    stage_step.buffers.has_changed,
                )

    def _plan(self, decision):
        plan = self._plans.get(decision)
        if plan is None:
            # What a task takes is known on the CPU only, so that on GPUs no rank waits for one
            # that is soon due.
            plan = decision.plan(self.layout, self.waits and self.devices is None)
            if len(self._plans) >= _MAX_PLANS:
                self._plans.clear()
            self._plans[decision] = plan
        return plan

    def _guarded(self, decision):
        """The decision after the guard of hint "auto" had its say; refuses what cannot be run."""
        plan = self._plan(decision)
        self._unguarded_plan = None
        if not SETTINGS.guard or not plan.is_guarded or decision.forward_only:
            return decision
        # On GPUs the host does not see how long tasks take.
        if self.devices is not None or self.layout.num_ranks == 1:
            return decision
        self._unguarded_plan = plan
        return self._guard.decide(decision)

    def _stage_step(self, stage, module, request, decision, modes, held_bytes):
        loss_rule = LossRule(
            stage in self.layout.loss_stages,
            request.loss_fn_of(stage),
            [weight * request.grad_scale for weight in decision.weights],
        )
        return StageStep(
            stage,
            module,
            (self.layout.sources_of(stage), self.layout.consumers_of(stage)),
            request.given_to(stage),
            loss_rule,
            decision.num_microbatches,
            modes,
            request.forward_only,
            request.return_outputs,
            torch.device("cpu") if self.devices is None else self.devices[stage],
            deterministic=request.deterministic,
            in_order=request.deterministic and stage not in decision.input_in_order,
            held_bytes=held_bytes,
            split_memory=self._split_memories[stage],
            sends_away=not self.shares_process and self.layout.sends_away(stage),
            adds_in_products=request.add_in_products,
        )

    def _rank_step(self, runtime, modules, request, decision, modes, launcher=None):
        counts_bytes = request.in_flight.bytes_of(runtime.rank) is not None
        held_bytes = HeldBytes() if counts_bytes and not request.forward_only else None
        stage_steps = {
            stage: self._stage_step(stage, modules[stage], request, decision, modes, held_bytes)
            for stage in self.layout.stages_of(runtime.rank)
        }
        timeout_ms = max(1, int(1000 * request.stall_timeout_s))
        plan = self._plan(decision)
        random = StepRandom(decision.seed, self.counter, shares_process=self.shares_process)
        return RankStep(
            runtime, plan, self.layout, stage_steps, modes, random, self._step, timeout_ms,
            launcher, held_bytes,
        )


class LocalSession(Session):
    """All ranks are threads of this process."""

    shares_process = True

    def __init__(self, layout, devices):
        super().__init__(layout, devices)
        self._has_warned_of_draws = False
        self._runtimes, self._workers, self._streams = [], [], None
        if devices is None:
            self._runtimes = _C.make_local_runtimes(
                layout.num_ranks, secrets.randbits(63), *idle_spin(layout.num_ranks)
            )
        else:
            by_rank = devices_by_rank(layout, devices)
            self._runtimes = make_local_device_runtimes(by_rank, secrets.randbits(63))
            self._streams = LocalStreams(by_rank)
        self._workers = [Worker(f"rrfp-rank{rank}") for rank in range(layout.num_ranks)]
        logger.info("%d ranks in one process, joined through %s, version %s, torch %s",
                    layout.num_ranks, self._runtimes[0].transport_name,
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
        self._step += 1
        self.counter += 1
        finished = queue.SimpleQueue()
        for worker, rank_step in zip(self._workers, rank_steps):
            if rank_step.launcher is not None:
                rank_step.launcher.fork()
            worker.submit(rank_step, finished)
        state = shared_state()
        try:
            errors = self._wait(rank_steps, finished)
        finally:
            for rank_step in rank_steps:
                if rank_step.launcher is not None:
                    rank_step.launcher.join()
        self._check_not_drawn(state)
        if errors:
            self._raise_first(rank_steps, errors)
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

    def _wait(self, rank_steps, finished):
        """Wait for every rank; interruptible. The exceptions of those that ended early."""
        errors = []
        num_left = len(rank_steps)
        try:
            while num_left:
                _, error = finished.get()
                num_left -= 1
                if error is not None:
                    errors.append(error)
                    if not isinstance(error, _C.StatusError):
                        self._abort(_C.StatusCode.CLOSED, f"a worker ended with {error!r}")
        except BaseException:
            # Ctrl-C: the tasks that run now are waited for; another Ctrl-C leaves them alone.
            self._abort(_C.StatusCode.INTERRUPTED, "the step was interrupted")
            try:
                while num_left:
                    finished.get()
                    num_left -= 1
            finally:
                self.close("its last step was interrupted")
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
        if self._in_step.locked():
            self._abort(_C.StatusCode.CLOSED, self.closed_because)
        ended = [worker.close(SETTINGS.close_timeout_s) for worker in self._workers]
        if not all(ended):
            logger.warning("a stage is still running while its pipeline is closed")
            _abandoned_sessions.append(self)  # its thread still uses the runtime
            return
        if self._streams is not None:
            end_side_by_side(self._runtimes, int(1000 * SETTINGS.close_timeout_s))
        else:
            for runtime in self._runtimes:
                runtime.close(0)
        self._runtimes = []


def dump_all():
    """What the ranks of every open pipeline of this process are doing, as a text."""
    texts = []
    for session in open_sessions():
        try:
            texts.append(session.dump(as_json=False))
        except Exception as error:  # being set up or closed; a report must not end the program
            texts.append(f"a pipeline cannot be described now: {error}")
    return "\n".join(texts) or "rrfp: no pipeline is open in this process"


def close_all():
    """Close every session of this process, at its exit."""
    for session in open_sessions():
        try:
            session.close("the process ends")
        except Exception:
            logger.exception("closing a pipeline at exit")


def check_not_forked():
    """Refuse to work in a process that was forked while a pipeline was open in its parent.

    Raises:
        RrfpError: It was.
    """
    if _forked_from_owner:
        raise RrfpError(
            "this process was forked from one that has a pipeline open; rrfp works in the parent "
            "only. Start the process with spawn, or close the pipelines before the fork."
        )


def _leave_to_parent():
    global _forked_from_owner
    _forked_from_owner = _forked_from_owner or bool(_open_sessions or _abandoned_sessions)
    for session in open_sessions():
        session.closed_because = "this process was forked from the one that owns it"
        _abandoned_sessions.append(session)
    _open_sessions.clear()


atexit.register(close_all)
os.register_at_fork(after_in_child=_leave_to_parent)
