"""A session whose ranks are processes: this one is a rank, its calling thread the worker."""

import logging
import os
import pickle
import threading
import time
import weakref

import torch

from rrfp import _C
from rrfp.agreement import decide
from rrfp.agreement_group import settle
from rrfp.arguments import is_timeout
from rrfp.device import Launcher, join_devices
from rrfp.end_watch import EndWatch
from rrfp.errors import RankTimeoutError, RrfpError, error_from_status
from rrfp.idle_spin import count_ranks_here, idle_spin
from rrfp.modes import CallerModes
from rrfp.moved_stages import StagesMoved
from rrfp.rank_cards import RanksParted
from rrfp.report import losses_of_plain, of_loss_stages, plain_losses, step_result
from rrfp.session import STEP_RUNS, Session, open_sessions
from rrfp.set_up_watch import SetUpWatch
from rrfp.settings import SETTINGS
from rrfp.step_guard import rows
from rrfp.tied_exchange import TiedExchange
from rrfp.value_text import class_name, error_text

logger = logging.getLogger("rrfp")

# By the name that travels; the more special first.
_REFUSALS = {"StagesMoved": StagesMoved, "TypeError": TypeError, "ValueError": ValueError}
_DEFAULT_TIMEOUT_S = 600.0
_FINISH_SLICE_MS = 60_000
# The deciding rank waits for views; the others wait a little longer for its answer, so that it
# is the one who says who is missing.
_ANSWER_GRACE_S = 5.0
_LOOK_S = 0.001


class ProcessSession(Session):
    """This process is one rank; the others are reached through sockets, and their GPUs through
    IPC or NCCL."""

    def __init__(self, layout, devices, rendezvous, listener, addresses, transport, segment=None):
        super().__init__(layout, devices)
        self.is_grouped = segment is not None
        self.waits = not self.is_grouped  # the other members know nothing of this rank's clock
        self.refusal = None  # the last error that all ranks agreed on
        self.ranks = rendezvous.member.ranks
        self._set_ups = SetUpWatch(rendezvous)
        self._runtime, self._end_watch = None, None
        self._ender = None  # the thread that ends the core now: a signal may have it close again
        token, run = rendezvous.token()
        try:
            self._end_watch = EndWatch(weakref.WeakMethod(self._unraised_end))
            control = _C.connect_control(
                listener, rendezvous.member.rank, addresses, token, run,
                rendezvous.time_left_ms(), rendezvous.watch_for_leavers()
            )
            if devices is None:
                spin_us, yields = idle_spin(count_ranks_here(listener.address, addresses))
                self._runtime = _C.join_control(
                    control, run, SETTINGS.heartbeat_ms, int(1000 * SETTINGS.peer_timeout_s),
                    spin_us, yields, segment,
                )
            else:
                _C.set_spin_us(SETTINGS.spin_us or 0)
                (device,) = set(devices.values())
                self._runtime = join_devices(
                    rendezvous, control, run, layout.directed_edges, device, transport, segment
                )
        except _C.StatusError as error:
            self.close("its set-up did not finish")
            raise error_from_status(error.code, error.origin_rank, error.message) from None
        except BaseException:
            self.close("its set-up was interrupted")
            raise
        logger.info("rank %d of %d joined through %s, version %s, torch %s", self._runtime.rank,
                    layout.num_ranks, self._runtime.transport_name, _C.build_info()["version"],
                    torch.__version__)

    def refuse(self, error, timeout_s):
        if self.closed_because is not None:
            return  # nobody to tell
        if not isinstance(error, Exception):  # no refusal: this rank is being interrupted
            with _Ending(self):
                raise error
        if not is_timeout(timeout_s):
            timeout_s = _DEFAULT_TIMEOUT_S
        name, text = class_name(error), error_text(error)
        is_plain = isinstance(error, (ValueError, TypeError))
        view = {"error": (name, text if is_plain else f"{name}: {text}")}
        if not self._enter():
            if self.closed_because is not None:
                return
            raise RrfpError(STEP_RUNS) from error
        try:
            self._user = threading.get_ident()
            if self.closed_because is None:  # as the error may have done that was just asked
                with _Ending(self):
                    self._agree(None, view, timeout_s, cause=error)
        finally:
            self._user = None
            self._leave()

    def _leave(self):
        super()._leave()
        if self._is_half_closed:  # during the step, when this thread used what the core has
            self.close()

    def _run(self, modules, request):
        with _Ending(self) as failure:
            view = self._view(modules, request)
            decision = self._agree(request, view, request.stall_timeout_s)
            modes = CallerModes(request.forward_only)
            rank_step = self._rank_step(
                self._runtime, modules, request, decision, modes, self._launcher(request)
            )
            self._step += 1
            self.counter += 1
            failure.rank_step = rank_step
            rank_step.run(other_thread=False)
            TiedExchange(self._tied, self._runtime, self.layout.rank_of_stage).run()
            self._learn(rank_step, decision)
            result = step_result([rank_step], self.layout, request, decision)
            self._finish(request, result, decision, rank_step)
        return result

    def _launcher(self, request):
        if self.devices is None:
            return None
        device = next(iter(self.devices.values()))
        is_nccl = self._runtime.transport_name == "nccl"
        return Launcher(torch.cuda.current_stream(device), request.lookahead,
                        free_sms=SETTINGS.free_sms if is_nccl else 0)

    def _agree(self, request, view, timeout_s, cause=None):
        """The decision that all ranks share for the next step.

        Raises:
            ValueError, TypeError: The same on every rank; nothing ran.
        """
        runtime = self._runtime
        view["step"] = self._step
        if runtime.rank == 0:
            answer = self._decide(request, view, timeout_s)
            body = pickle.dumps(answer)
            for peer in range(1, runtime.num_ranks):
                runtime.send_control(peer, body)
            if isinstance(answer, tuple):
                self._wait_sends()  # this process may end with the error
        else:
            runtime.send_control(0, pickle.dumps(view))
            body = self._hear(0, timeout_s + _ANSWER_GRACE_S)
            if body is None:
                self._give_up_on([0], timeout_s, self._runtime.describe())
            answer = pickle.loads(body)
        if self.is_grouped:
            answer = settle(runtime, answer, request, self.counter, timeout_s)
        if isinstance(answer, tuple):
            name, text = answer
            self.refusal = _REFUSALS.get(name, ValueError)(text)
            raise self.refusal from cause
        return answer

    def _decide(self, request, view, timeout_s):
        """On rank 0: a Decision, or (name of error, text)."""
        end = time.monotonic() + timeout_s
        views, absent, seen = [view], [], ""
        for peer in range(1, self._runtime.num_ranks):
            # Once the time is over: who else has said nothing so far.
            body = self._hear(peer, max(_LOOK_S, end - time.monotonic()))
            if body is None:
                absent.append(peer)
                seen = seen or self._runtime.describe()  # while this rank still waits
            else:
                views.append(pickle.loads(body))
        if absent:
            self._give_up_on(absent, timeout_s, seen)
        for rank, other in enumerate(views):
            if "error" in other:
                name, text = other["error"]
                return name, f"rank {rank}: {text}"
        try:
            decision = self._guarded(decide(request, views, self.layout))
        except (TypeError, ValueError) as error:
            kinds = (kind for kind in _REFUSALS if isinstance(error, _REFUSALS[kind]))
            return next(kinds), str(error)
        return decision

    def _hear(self, peer, timeout_s):
        """A peer's word on the coming step; None when the time is over.

        Raises:
            RanksParted: A rank sets up another pipeline instead; the same on every rank.
        """
        try:
            return self._set_ups.hear(self._runtime, peer, timeout_s, self._step)
        except RanksParted:
            close_pipelines_of(self.ranks)
            raise

    def _give_up_on(self, peers, timeout_s, seen):
        """Ends the run everywhere because ranks did not enter the step. ``seen``: by this rank."""
        text = (
            f"{', '.join(f'rank {peer}' for peer in peers)} did not enter step {self._step} within "
            f"{timeout_s:g} s of rank {self._runtime.rank}. Every rank must call the pipeline for "
            f"every step; where one needs longer between two, raise stall_timeout_s. {seen}"
        )
        self._runtime.abort(_C.StatusCode.TIMED_OUT, peers[0], text)
        raise RankTimeoutError(text, rank=peers[0], report=self._describe())

    def _finish(self, request, result, decision, rank_step):
        """Wait until every rank has run its tasks, so that all see the step end alike.

        Bounded by the peers: one that dies or stalls ends this wait with its error.
        """
        runtime = self._runtime
        self._wait_sends()
        losses = {}
        if request.broadcast_loss and result.losses is not None:
            tables = result.losses
            if not isinstance(tables, dict):
                tables = {self.layout.loss_stages[0]: tables}
            losses = plain_losses(tables)
        taken = rows(rank_step) if decision.gathers_times else None
        if runtime.rank == 0:
            taken = [taken]
            for peer in range(1, runtime.num_ranks):
                said, of_peer = self._recv(peer)
                losses.update(said)
                taken.append(of_peer)
            body = pickle.dumps(losses)
            for peer in range(1, runtime.num_ranks):
                runtime.send_control(peer, body)
            self._wait_sends()  # this process may end as soon as its step has returned
        else:
            runtime.send_control(0, pickle.dumps((losses, taken)))
            losses = self._recv(0)
        if runtime.rank == 0 and decision.gathers_times:
            self._guard.learn(self._unguarded_plan, decision.costs, taken)
        if request.broadcast_loss and losses:
            own = result.losses if isinstance(result.losses, dict) else {}
            if result.losses is None or own:
                result.losses = of_loss_stages({
                    stage: own[stage] if stage in own else losses_of_plain(losses[stage])
                    for stage in sorted(losses)
                }, self.layout)

    def _wait_sends(self):
        while not self._runtime.wait_sends(_FINISH_SLICE_MS):
            pass

    def _recv(self, peer):
        while True:
            body = self._runtime.recv_control(peer, _FINISH_SLICE_MS)
            if body is not None:
                return pickle.loads(body)

    def _own_runtimes(self):
        return [self._runtime]

    def _unraised_end(self):
        """For an EndWatch: what has ended the run although a step of this rank goes on."""
        runtime, thread = self._runtime, self._user
        if thread is None or runtime.status is None:
            return None
        state = runtime.views()[runtime.rank]["state"]
        return runtime.status, f"rank {runtime.rank} {state}", thread

    def _end(self):
        if self._end_watch is not None:
            self._end_watch.close()
        if self._runtime is None:
            return
        if self._user is not None:
            self._runtime.abort(
                _C.StatusCode.CLOSED, self._runtime.rank, f"{self.closed_because} in a step"
            )
        # A thread that steps uses the core until it leaves, and may be this one: a stage's, or one
        # that a signal struck. Until the end is known, whoever leaves has it to do.
        self._is_half_closed = True
        thread = threading.get_ident()
        if thread in (self._user, self._ender):
            return
        try:
            if self._in_step.acquire(timeout=SETTINGS.close_timeout_s):
                self._ender = thread
                self._runtime.end(int(1000 * SETTINGS.close_timeout_s))  # and its connections
                self._is_half_closed = False
        finally:
            if self._ender == thread:
                self._ender = None
            super()._leave()  # not this class's, which would come back here


class _Ending:
    """Context of a step: whatever ends it early ends it on every rank and closes the session."""

    def __init__(self, session):
        self.session = session
        self.process = os.getpid()
        self.rank_step = None

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        session = self.session
        if error is None or error is session.refusal:
            return False  # every rank has raised it, and nothing was run
        if os.getpid() != self.process:
            return False  # a child, as a callable hint may fork: the session is its parent's
        runtime = session._runtime
        if isinstance(error, _C.StatusError):
            report = session._describe()
            session.close("its last step ended with an error")
            is_mine = self.rank_step is not None and error.origin_rank == runtime.rank
            cause = self.rank_step.stage_error if is_mine else None
            raise error_from_status(
                error.code, error.origin_rank, error.message, report
            ) from cause
        if isinstance(error, KeyboardInterrupt):
            runtime.abort(
                _C.StatusCode.INTERRUPTED, runtime.rank,
                f"rank {runtime.rank} was interrupted (process {os.getpid()})",
            )
        else:
            runtime.abort(
                _C.StatusCode.CLOSED, runtime.rank,
                f"rank {runtime.rank} ended with {class_name(error)}: {error_text(error)}",
            )
        session.close("its last step ended with an error")
        return False


def close_pipelines_of(ranks):
    """On every rank alike: of those that parted, nobody knows which pipelines the others keep."""
    for session in open_sessions():
        if isinstance(session, ProcessSession) and session.ranks == ranks:
            session.close("its ranks parted: one set up a pipeline while others were in a step")
