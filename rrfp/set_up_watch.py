"""Ranks that part: one sets up a pipeline while others wait for it in a step of an earlier one.

``run_pipeline`` keeps a pipeline for the modules and arguments of a call. When one rank passes
others, it alone begins a set-up, and each side would wait for the other until its time is over.
"""

import logging
import math
import threading
import time

from rrfp.errors import ClosedError, PeerLostError
from rrfp.rank_cards import check_cards
from rrfp.rendezvous import TELL_AFTER_S, Rendezvous
from rrfp.thread_room import check_room

logger = logging.getLogger("rrfp")

# How often a waiting rank looks into the store, and for how long a rank must be ahead: set-ups
# and steps of one process may also run in different threads, a moment apart from other ranks'.
_LOOK_EVERY_S = 0.5
_SURE_AFTER_S = 10.0
_SURE_AFTER_SHARE = 0.25  # of the time-out, where that is less


class _Look(threading.Thread):
    """One look into the store, which answers late or never when its host is out of reach; the wait
    that wants to know must not wait for that.

    Attributes:
        ahead: Once it is over: the ranks that are, none where nobody knows.
    """

    def __init__(self, rendezvous):
        super().__init__(name="rrfp set-up look", daemon=True)
        self._rendezvous = rendezvous
        self.ahead = []
        self.start()

    def run(self):
        try:
            self.ahead = self._rendezvous.ranks_ahead()
        except (PeerLostError, ClosedError):  # the peers themselves are watched in the core
            pass


class SetUpWatch:
    """Looks, while this rank waits before a step, whether a rank it waits for does something else.

    ``rendezvous`` is the set-up of the pipeline that runs the step.
    """

    def __init__(self, rendezvous):
        self._rendezvous = rendezvous
        self._look = None  # the one under way, or the last

    def hear(self, runtime, peer, timeout_s, step):
        """A peer's control message; None when the time is over.

        Blocks in the core, and wakes for an abort.

        Raises:
            RanksParted: The same on every rank, those that set up included.
        """
        if self._look is not None and not self._look.is_alive():
            self._look = None  # of an earlier wait
        now_s = time.monotonic()
        end_s, together_s = now_s + timeout_s, now_s
        sure_after_s = min(_SURE_AFTER_S, _SURE_AFTER_SHARE * timeout_s)
        tell_s = now_s + TELL_AFTER_S
        while True:
            left_s = end_s - time.monotonic()
            body = runtime.recv_control(peer, max(1, int(1000 * min(left_s, _LOOK_EVERY_S))))
            now_s = time.monotonic()
            if body is not None or now_s >= end_s:
                return body
            if now_s >= tell_s:
                tell_s = math.inf
                logger.warning(
                    "rank %d has waited %g s for the word of rank %d on step %d, and gives up "
                    "after %g s. %s", self._rendezvous.member.rank, TELL_AFTER_S, peer, step,
                    timeout_s, runtime.describe(),
                )
            if self._look is not None and self._look.is_alive():
                continue
            ahead = self._look.ahead if self._look is not None else []
            if not ahead:
                together_s = now_s
            elif now_s - together_s >= sure_after_s:
                self._part(ahead[0], end_s - now_s, step)
            try:
                check_room()
                self._look = _Look(self._rendezvous)
            except (OSError, RuntimeError):  # no more threads: it waits without looking
                self._look = None

    def _part(self, ahead, timeout_s, step):
        """Take part in the set-up, to refuse it: so all ranks hear of it and stay in step."""
        member = self._rendezvous.member
        text = (
            f"rank {ahead} sets up a pipeline while rank {member.rank} waits for it in step {step} "
            f"of an earlier one. Rank {ahead} passed other modules or arguments than before "
            "(stages, placement, edges, loss_stages, tied, num_ranks, group, transport), or built "
            "a Pipeline; do so on every rank."
        )
        with Rendezvous(member, timeout_s) as rendezvous:
            cards = rendezvous.exchange({"error": ("RanksParted", text)})
        try:
            check_cards(cards, ())
        except ValueError as refusal:
            rendezvous.see_off(refusal)
            raise
