"""Sessions: the ranks of this process, set up once and used every step.

A session holds no module: it is kept by ``Pipeline`` and by the cache behind ``run_pipeline``,
and must not keep a model alive.
"""

import atexit
import contextlib
import logging
import os
import threading
import weakref

import torch

from rrfp.activations import ActivationMemory, HeldBytes
from rrfp.bounded_store import end_store_calls
from rrfp.cost_watch import CostWatch
from rrfp.dump import describe_ranks, dump_json, dump_text, install_handler
from rrfp.errors import ClosedError, RrfpError
from rrfp.leaf_gradients import HookWatch
from rrfp.moved_stages import moved_stages
from rrfp.settings import SETTINGS
from rrfp.split_backward import SplitMemory
from rrfp.stage import LossRule, StageStep
from rrfp.stage_traits import TraitsMemory
from rrfp.step_guard import StepGuard
from rrfp.task_rng import StepRandom
from rrfp.tied import TiedStep
from rrfp.worker import RankStep

logger = logging.getLogger("rrfp")

_open_sessions = weakref.WeakSet()
# Never closed and never collected: in a forked child, and where a stage would not end.
_abandoned_sessions = []
_forked_from_owner = False
_MAX_PLANS = 16
STEP_RUNS = "a step of this pipeline is running in another thread; wait for it."


def leave_running(session):
    """Keep a closed session for good: a thread of it still uses what it has."""
    _abandoned_sessions.append(session)


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
        self._is_half_closed = False
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
        # Reentrant: a Ctrl-C just after a thread has acquired it must not lock that thread out.
        self._in_step = threading.RLock()
        self._user = None  # the thread that uses the runtime now
        _open_sessions.add(self)
        install_handler(dump_all)

    def run(self, modules, request):
        """Run one step of ``{stage: module}`` as the request asks.

        Raises:
            ValueError: Wrong arguments; nothing was run and the session is usable.
            RrfpError: The step ended early; the session is closed.
        """
        if not self._enter():
            self._refuse_closed()  # another thread ends it just now
            raise RrfpError(STEP_RUNS)
        try:
            self._user = threading.get_ident()
            self._refuse_closed()
            with TiedStep(self.layout.tied, modules, request.forward_only) as self._tied:
                result = self._run(modules, request)
                self._cost_watch.look(result.report, request.forward_only)
                return result
        finally:
            self._tied = self._user = None  # before any call, in which a Ctrl-C may strike
            self._leave()

    def _enter(self):
        """Whether this thread may use the core: nobody does, this thread's own step included."""
        return self._user is None and self._in_step.acquire(blocking=False)

    def _leave(self):
        """Let others use the core. Also gives back what a Ctrl-C after acquiring had left."""
        with contextlib.suppress(RuntimeError):  # no longer acquired
            while True:
                self._in_step.release()

    def refuse(self, error, timeout_s):
        """This rank's arguments are wrong: tell the other ranks, if there are any elsewhere."""

    def _refuse_closed(self):
        if self.closed_because is not None:
            raise ClosedError(f"this pipeline is closed: {self.closed_because}. Build a new one.")

    def dump(self, as_json):
        self._refuse_closed()
        description = self._describe()
        return dump_json(description) if as_json else dump_text(description)

    def _describe(self):
        return describe_ranks(self._own_runtimes(), in_one_process=self.shares_process)

    def close(self, reason="close() was called"):
        """End the session; more than once is fine."""
        if self.closed_because is None or self._is_half_closed:
            self.closed_because = self.closed_because or reason
            self._is_half_closed = False
            _open_sessions.discard(self)
            try:
                self._end()
            except BaseException:  # Ctrl-C: the rest is for the next close(), the exit's at last
                self._is_half_closed = True
                _open_sessions.add(self)
                raise
            if self._is_half_closed:  # a step goes on, whose thread does the rest, or the exit
                _open_sessions.add(self)
                return
            _open_sessions.discard(self)  # where a signal closed it while it was being closed
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
        # Members of an agreement group decide alike only by what all were given: what the tasks of
        # one pipeline took is no such thing.
        if self.is_grouped:
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
    end_store_calls()


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
