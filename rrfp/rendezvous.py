"""How the processes of a pipeline find one another, through torch.distributed's store.

Every rank publishes what it is (addresses, stages, or why it cannot take part); every rank
reads all of it and judges it by the same rules, so that all raise the same error. Rank 0 draws
the token with which connections prove that they belong to the run.
"""

import contextlib
import logging
import math
import os
import pickle
import secrets
import time
from dataclasses import dataclass

import torch

from rrfp import _C
from rrfp.bounded_store import (
    BoundedStore,
    ProgramEndsError,
    StoreSilentError,
    store_call,
)
from rrfp.errors import ClosedError, PeerLostError, RankTimeoutError, RrfpError
from rrfp.value_text import class_name

logger = logging.getLogger("rrfp")

TELL_AFTER_S = 30.0  # a wait for another rank is worth a word then
_POLL_S = 0.005
_LOOK_EVERY_S = 0.5
# For so long a rank that passed over set-ups which were given up waits for the others, who may
# have ended; longer where one of them waits as well. Also what is left after a wait with a grace.
_GRACE_S = 5.0
_SEE_OFF_S = 2.0
# Keys of a corner.
_OUTCOME = "outcome"  # _MET, or (rank, text, whether it is a refusal) by who gave it up
_AWAITED = "awaited"  # by a rank that waits there as long as it was asked to
_LEFT = "left"  # by a rank whose set-up ended with an error
_MET = pickle.dumps(None)

_corners_used = set()  # by this process


class RefusedElsewhere(RrfpError):
    """Why a rank leaves this set-up: what it belongs to is refused, for what others hear too."""


@dataclass(frozen=True)
class Membership:
    """This process in a process group."""

    rank: int
    ranks: tuple  # global ranks of the group, by rank in it
    group: str = ""  # torch's name of it, the same on all its ranks

    @property
    def num_ranks(self):
        return len(self.ranks)


def membership(group):
    """This process's place in ``group`` (None: the world).

    Raises:
        ValueError: It is not a member.
    """
    dist = torch.distributed
    group = dist.group.WORLD if group is None else group
    rank = dist.get_rank(group)
    if rank < 0:
        raise ValueError("this process is not a member of group; only members may call this.")
    return Membership(rank, tuple(dist.get_process_group_ranks(group)), group.group_name)


def master_host():
    """The host of torch.distributed's store as this process was told it; "" where it has none."""
    store = torch.distributed.distributed_c10d._get_default_store()
    while isinstance(store, torch.distributed.PrefixStore):
        store = store.underlying_store
    if isinstance(store, torch.distributed.TCPStore):
        return store.host
    return os.environ.get("MASTER_ADDR", "")


def count_key(corner, rank):
    """Of the store: how many set-ups a rank has begun in a corner."""
    return f"{corner}/set-ups of rank {rank}"


class Rendezvous:
    """One set-up: a corner of the store that only these ranks use, and only this time.

    Set-ups are numbered. A rank begins the first that it has not begun and that nobody has given
    up, so that ranks that retry meet however often each has failed alone. A set-up has one
    outcome, for all ranks: either everybody came, or somebody gave it up before.

    As a context it holds the set-up: a rank that leaves it with an exception gives it up, and no
    other takes what it had published for a live rank's.

    Attributes:
        refusal: An exception that the other ranks know of; to leave with it gives nothing up.
    """

    def __init__(self, member, timeout_s, purpose="pipeline"):
        self.member = member
        self.refusal = None
        self._timeout_s = timeout_s
        now_s = time.monotonic()
        self._end, self._tell_s = now_s + timeout_s, now_s + TELL_AFTER_S
        self._unbounded = torch.distributed.distributed_c10d._get_default_store()
        self.store = BoundedStore(self._unbounded, self._end)
        # The purpose keeps counts apart: who forms an agreement group of these ranks by mistake
        # is not ahead of the others when they set up a pipeline.
        self._place = f"rrfp/{purpose}/{','.join(map(str, member.ranks))}"
        self._counts = [count_key(self._place, rank) for rank in range(member.num_ranks)]
        self._passed_over = None  # outcome of the last set-up that was; None: waits in full
        self._grace_end = None
        self._have_met = False
        self._num_exchanges = 0
        try:
            with self.store_reachable():
                self.corner = self._begin()
                if self._passed_over is None:
                    self._set(_AWAITED, b"1")
        except BaseException:
            self.store.close()
            raise

    def _begin(self):
        """The corner of the first set-up that this rank has not begun and nobody has given up."""
        # Counted in the store and not here: a process that takes a dead one's place has not
        # seen the set-ups before it.
        number = self.store.add(self._counts[self.member.rank], 1)
        if number > 1 and self._place not in _corners_used:
            # The process before this one may have died in its last, and left a card there.
            text = f"rank {self.member.rank} was started again"
            outcome = pickle.dumps((self.member.rank, text, False))
            self.store.compare_set(f"{self._place}/{number - 1}/{_OUTCOME}", "", outcome)
        _corners_used.add(self._place)
        while (given_up := self._given_up(number, self.store)) is not None:
            self._passed_over = given_up
            number = self.store.add(self._counts[self.member.rank], 1)
        return f"{self._place}/{number}"

    @property
    def number(self):
        """Which set-up of these ranks it is; who begins one with a higher number has left it."""
        return int(self.corner.rpartition("/")[2])

    @property
    def is_late(self):
        """Whether the others had given up a set-up before this rank began it."""
        return self._passed_over is not None

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        if error is not None and error is not self.refusal:
            is_refusal = isinstance(error, RefusedElsewhere)
            what = f"left it with {class_name(error)}"
            if isinstance(error, RrfpError):
                what = f"cannot take part: {error}" if is_refusal else f"{what}: {error}"
            text = f"rank {self.member.rank} {what}"
            with contextlib.suppress(PeerLostError, ClosedError):  # there is nobody to tell
                self.leave(text, is_refusal)
        self.store.close()

    def leave(self, text, is_refusal=False):
        """Give the set-up up, also if the others have just met and wait for what comes next."""
        with self.store_reachable():
            if not self._give_up(self.member.rank, text, is_refusal):
                self._have_met = self._given_up(self.number, self.store) is None
                self._give_up(self.member.rank, text, is_refusal)

    def see_off(self, error, stays=True):
        """After this set-up, which ended with an error: stay until the ranks that are in it have
        left it too, at most ``_SEE_OFF_S``. Without ``stays``: tell them only not to wait.

        They read why in a store that this process may hold, and it may end with the error.
        """
        if isinstance(error, (PeerLostError, ClosedError)):
            return  # the store itself is lost, or the program ends
        end_s = time.monotonic() + _SEE_OFF_S
        store = BoundedStore(self._unbounded, end_s)
        try:
            store.set(f"{self.corner}/{_LEFT}/{self.member.rank}", b"1")
            if not stays or not isinstance(error, Exception):
                return  # the latter: Ctrl-C
            counts = enumerate(store.add(key, 0) for key in self._counts)
            # Who has begun a later one has left this one, or passed over it.
            keys = [f"{self.corner}/{_LEFT}/{rank}" for rank, n in counts if n == self.number]
            while not store.check(keys) and time.monotonic() < end_s:
                time.sleep(_POLL_S)
        except (StoreSilentError, torch.distributed.DistError):
            pass  # who was to hear of it cannot any more
        finally:
            store.close()

    def exchange(self, card):
        """Publish this rank's card (a dict) and return those of all ranks, by rank.

        May be called again, by all ranks alike.

        Raises:
            RankTimeoutError: A rank did not publish in time.
        """
        card = {
            **card,
            "version": _C.build_info()["version"],
            "group": self.member.group,
        }
        with self.store_reachable():
            if self.member.rank == 0 and self._num_exchanges == 0:
                token = pickle.dumps((secrets.token_bytes(32), secrets.randbits(63)))
                self._set("token/0", token)
        self._num_exchanges += 1
        return self.share(f"exchange {self._num_exchanges}", card)

    def publish(self, name, value):
        """Say something under a name, once per attempt, without waiting for anybody."""
        with self.store_reachable():
            self._set(f"{name}/{self.member.rank}", pickle.dumps(value))

    def leave_word(self, name, value):
        """Say something for any rank to hear that asks for the name; the last word counts."""
        with self.store_reachable():
            self._set(name, pickle.dumps(value))

    def word(self, name):
        """What was left under a name; None for nothing so far."""
        key = f"{self.corner}/{name}"
        with self.store_reachable():
            return pickle.loads(self.store.get(key)) if self.store.check([key]) else None

    def share(self, name, value, watch=None, grace_s=0.0):
        """As ``publish``; what every rank has said under the name, by rank.

        ``watch`` is called while this rank waits for another, and may raise. It waits so much
        longer than the time-out as ``grace_s`` says, and then leaves some time for what follows.

        Raises:
            RankTimeoutError: A rank said nothing in time.
        """
        self.publish(name, value)
        self._end += grace_s
        with self.store_reachable():
            values = [self._get(name, rank, watch) for rank in range(self.member.num_ranks)]
            if not self._have_met:
                self._settle(_MET)
                self._check_given_up()
                self._have_met, self._passed_over = True, None
        if grace_s:
            # All are there now, be it at the last moment: what follows is no wait for who may not
            # come, and to have no time for it would end a set-up that is nearly done.
            self._end = max(self._end - grace_s, time.monotonic() + _GRACE_S)
        return values

    def watch_for_leavers(self):
        """A function to be called several times a second while ranks connect past the store.

        It raises RankTimeoutError once a rank has given this set-up up, and looks every
        ``_LOOK_EVERY_S``.
        """
        look_s = time.monotonic() + _LOOK_EVERY_S

        def watch():
            nonlocal look_s
            if time.monotonic() < look_s:
                return
            with self.store_reachable():
                self._check_given_up()
            look_s = time.monotonic() + _LOOK_EVERY_S

        return watch

    def token(self):
        """(run token, run number) drawn by rank 0."""
        with self.store_reachable():
            return self._get("token", 0)

    def ranks_ahead(self):
        """Ranks that are in a set-up of these ranks which this rank has not begun yet.

        Also after this set-up; waits as long as the store does.
        """
        store = self._unbounded
        with self.store_reachable(), store_call():
            counts = [store.add(key, 0) for key in self._counts]
            return [
                rank for rank, count in enumerate(counts)
                if count > counts[self.member.rank] and self._given_up(count, store) is None
            ]

    def time_left_ms(self):
        return max(1, int(1000 * (self._end - time.monotonic())))

    @contextlib.contextmanager
    def store_reachable(self):
        """Turns the loss of the store, inside, into PeerLostError."""
        try:
            yield
        except torch.distributed.DistError as error:
            raise PeerLostError(
                f"rank {self.member.rank} lost the store of torch.distributed while the pipeline "
                f'was set up: torch reported "{error}". The process that holds the store, usually '
                "global rank 0, is gone; start the job again."
            ) from error
        except ProgramEndsError:
            raise ClosedError(
                f"this program ended while rank {self.member.rank} set up a pipeline."
            ) from None
        except StoreSilentError:
            raise PeerLostError(
                f"rank {self.member.rank} got no answer from the store of torch.distributed while "
                f"the pipeline was set up, within {self._timeout_s:g} s. The process that holds "
                "the store, usually global rank 0, is frozen or out of reach; start the job again."
            ) from None

    def _get(self, name, rank, watch=None):
        # Asked again and again rather than waited for: a wait in the store hears no Ctrl-C.
        while not self._has_said(name, rank):
            self._check_given_up()
            self._check_time(name, rank)
            if watch is not None:
                watch()
            time.sleep(_POLL_S)
        return pickle.loads(self.store.get(f"{self.corner}/{name}/{rank}"))

    def _has_said(self, name, rank):
        return self.store.check([f"{self.corner}/{name}/{rank}"])

    def _check_time(self, name, rank):
        """Gives the set-up up when the time to wait for what a rank says is over."""
        now_s = time.monotonic()
        if now_s >= self._tell_s:
            self._tell_s = math.inf
            logger.warning(
                "rank %d has waited %g s for rank %d (global rank %d) to set up a pipeline, and "
                "gives up after %g s", self.member.rank, TELL_AFTER_S, rank,
                self.member.ranks[rank], self._timeout_s,
            )
        if self._passed_over is not None:
            if self._grace_end is None:
                self._grace_end = min(self._end, now_s + _GRACE_S)
            if now_s < self._grace_end:
                return
            if not self.store.check([f"{self.corner}/{_AWAITED}"]):
                self._give_up(*self._passed_over)
                self._check_given_up()
            self._passed_over = None
        if now_s >= self._end:
            text = self._absence(name, rank)
            if self._give_up(rank, text):
                self.refusal = RankTimeoutError(text, rank=rank)
                raise self.refusal
            self._check_given_up()

    def _absence(self, name, first):
        """Which ranks, from the first, have said nothing under a name."""
        later = range(first + 1, self.member.num_ranks)
        absent = [first, *(rank for rank in later if not self._has_said(name, rank))]
        named = ", ".join(f"rank {rank} (global rank {self.member.ranks[rank]})" for rank in absent)
        what = "it runs and calls" if len(absent) == 1 else "they run and call"
        return (
            f"{named} did not join the pipeline within {self._timeout_s:g} s, seen from rank "
            f"{self.member.rank}. Check that {what} rrfp as often as the others; where that takes "
            "longer, raise stall_timeout_s (of a Pipeline, set_up_timeout_s)."
        )

    def _give_up(self, rank, text, is_refusal=False):
        """False when others have come to an outcome before; after a meeting: never."""
        outcome = pickle.dumps((rank, text, is_refusal))
        if self._have_met:
            self._set(_OUTCOME, outcome)
            return True
        return self._settle(outcome) == outcome

    def _settle(self, outcome):
        """The outcome, which is this one unless there was one before."""
        return self.store.compare_set(f"{self.corner}/{_OUTCOME}", "", outcome)

    def _set(self, name, value):
        self.store.set(f"{self.corner}/{name}", value)

    def _given_up(self, number, store):
        """The outcome of a set-up that was given up; None when nobody has."""
        key = f"{self._place}/{number}/{_OUTCOME}"
        return pickle.loads(store.get(key)) if store.check([key]) else None

    def _check_given_up(self):
        given_up = self._given_up(self.number, self.store)
        if given_up is not None:
            rank, text, is_refusal = given_up
            text = f"this set-up has been given up: {text}"
            self.refusal = ValueError(text) if is_refusal else RankTimeoutError(text, rank=rank)
            raise self.refusal
