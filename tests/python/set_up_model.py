"""Every interleaving of ranks that set up, give up and try again, on a store in memory.

The code that is explored is rrfp's own: an attempt runs from its start against a store that
repeats what it answered before, performs one more operation, and stops. What an attempt has been
answered so far is thus its whole state, and the states of all ranks are searched like a graph.

Time: a rank's wait may end when no other rank can go on, or when theirs have ended as well. A
rank that is late, leaves, or dies and is started again does so at any moment.
"""

import contextlib
import functools
from dataclasses import dataclass, replace
from types import SimpleNamespace
from unittest import mock

from set_up_attempt import CONNECTING, LEFT, SLEPT, TIMEOUT_S, Attempt, Leave, NoError, Pause

from rrfp import rendezvous
from rrfp.errors import RankTimeoutError

GRACE_IS_OVER_S, ALL_IS_OVER_S = 50.0, 1000.0
# A rank's trouble in its first attempt; without a barrier LATE means that it begins at any time,
# with one that it does not take part in the first round.
WELL, LATE, LEAVES, DIES = "well", "late", "leaves", "dies"
_MOST_FAILURES_WHILE_LATE = 2


@dataclass(frozen=True)
class Rank:
    """``heard``: what its attempt has been answered so far; None outside one."""

    trouble: str
    heard: tuple | None
    has_met: bool = False
    is_new: bool = True  # the process has begun no set-up before
    began: int = 0  # place of its attempt among those under way, by when they began
    num_failures: int = 0  # of its attempts, since the last trouble of any rank

    @property
    def is_connecting(self):
        return CONNECTING in (self.heard or ())

    @property
    def has_waited(self):
        """Whether its time was over when it looked last."""
        for answer in reversed(self.heard or ()):
            if answer == SLEPT:
                return False
            if type(answer) is float and answer:
                return True
        return False

    @property
    def ends_of_waits(self):
        """What the clock may say at the end of a wait: first that the grace is over, if any is."""
        has_passed_over = sum(type(answer) is int for answer in self.heard) > 1  # it counted on
        if has_passed_over and GRACE_IS_OVER_S not in self.heard:
            return (GRACE_IS_OVER_S, ALL_IS_OVER_S)
        return (ALL_IS_OVER_S,)


@dataclass(frozen=True)
class World:
    ranks: tuple
    has_barrier: bool
    store: tuple = ()  # (key, value), sorted


class Explorer:
    """Searches all that can become of ranks with these troubles."""

    def __init__(self, troubles, has_barrier):
        ranks = tuple(Rank(t, None if t == LATE else ()) for t in troubles)
        self.start = World(ranks, has_barrier)
        self.num_worlds = 0
        self._attempt = None

    def most_failures(self, enough):
        """How often a rank fails after the last trouble, at most; stops at ``enough``."""
        most, seen, left = 0, {self.start}, [self.start]
        with self._patched():
            while left and most < enough:
                world = left.pop()
                most = max(most, *(rank.num_failures for rank in world.ranks))
                following = [each for each in self._following(world) if each != world]
                assert following or all(rank.has_met for rank in world.ranks), world
                new = [each for each in following if each not in seen]
                seen.update(new)
                left += new
        self.num_worlds = len(seen)
        return most

    @contextlib.contextmanager
    def _patched(self):
        c10d = SimpleNamespace(_get_default_store=lambda: self._attempt)
        names = SimpleNamespace(DistError=NoError, distributed_c10d=c10d)
        clock = SimpleNamespace(monotonic=lambda: self._attempt.monotonic(),
                                sleep=lambda s: self._attempt.sleep(s))
        with (mock.patch.object(rendezvous, "torch", SimpleNamespace(distributed=names)),
              mock.patch.object(rendezvous, "BoundedStore", lambda store, end_s: store),
              mock.patch.object(rendezvous, "TELL_AFTER_S", 2 * ALL_IS_OVER_S),
              mock.patch.object(rendezvous, "time", clock)):
            yield

    def _following(self, world):
        for number, rank in enumerate(world.ranks):
            if rank.trouble == LATE and not world.has_barrier:
                yield self._after_trouble(world, number, rank)
            if rank.heard is None:
                continue
            yield self._step(world, number)
            if rank.trouble == DIES and rank.heard and not rank.is_connecting:
                yield self._after_trouble(world, number, rank)
            if rank.trouble == LEAVES and not rank.is_connecting:
                yield self._step(world, number, leaves=True)
            if self._may_be_over(world, number):
                for now_s in rank.ends_of_waits:
                    yield self._step(world, number, now_s)

    def _may_be_over(self, world, number):
        """Whether the others can do nothing about it, and those that wait longer have ended."""
        rank = world.ranks[number]
        is_late = any(other.trouble == LATE for other in world.ranks)
        if is_late and rank.num_failures >= _MOST_FAILURES_WHILE_LATE:
            return False
        if not self._is_stuck(world, number):
            return False
        for place, other in enumerate(world.ranks):
            if place == number or other.heard is None:
                continue
            if other.has_waited:
                if rank.is_connecting or other.began != rank.began:
                    return False
            elif other.began < rank.began or not self._is_stuck(world, place):
                return False
        return True

    def _is_stuck(self, world, number):
        """Whether a rank can do nothing but ask again as long as no other does anything."""
        seen = set()
        while world not in seen:
            seen.add(world)
            following = self._step(world, number)
            if following.store != world.store or following.ranks[number].heard is None:
                return False
            world = following
        return True

    def _after_trouble(self, world, number, rank):
        ranks = [replace(other, num_failures=0) for other in world.ranks]
        ranks[number] = replace(rank, trouble=WELL, heard=(), num_failures=0)
        return replace(world, ranks=_last(ranks, number))

    def _step(self, world, number, now_s=None, leaves=False):
        """The world after one operation of a rank; the same one where it cannot do that."""
        rank = world.ranks[number]
        done = self._operation(number, rank.heard, rank.is_new, world.store, now_s, leaves)
        if done is None:
            return world
        has_met, heard, store = done
        rank = replace(rank, heard=heard, trouble=WELL if leaves else rank.trouble)
        if has_met is not None:
            failures = rank.num_failures + (not has_met and LEFT not in heard)
            rank = replace(rank, heard=None if has_met or world.has_barrier else (),
                           has_met=has_met, is_new=False, num_failures=failures)
        ranks = list(world.ranks)
        ranks[number] = rank
        if leaves:
            ranks = [replace(other, num_failures=0) for other in ranks]
        if rank.heard == ():
            ranks = _last(ranks, number)
        if world.has_barrier and all(other.heard is None for other in ranks):
            ranks = [self._through_barrier(other, ranks) for other in ranks]
        return replace(world, ranks=tuple(ranks), store=store)

    @functools.cache  # noqa: B019 - an explorer does not live long
    def _operation(self, number, heard, is_new, store, now_s, leaves):
        """(whether it met, or None when it goes on; what it has heard; the store)."""
        self._attempt = attempt = Attempt(heard, store, now_s, leaves)
        used = mock.patch.object(rendezvous, "_corners_used", set() if is_new else _All())
        member = rendezvous.Membership(number, tuple(range(len(self.start.ranks))))
        has_met = False
        try:
            with used, rendezvous.Rendezvous(member, TIMEOUT_S) as set_up:
                set_up.share("card", number)
                attempt.connect(set_up.corner, number, member.num_ranks)
            has_met = True
        except Pause:
            has_met = None
        except (RankTimeoutError, Leave):
            pass
        if not attempt.has_read_the_clock:
            return None
        return has_met, tuple(attempt.heard), tuple(sorted(attempt.values.items()))

    def _through_barrier(self, rank, ranks):
        if any(other.trouble == LATE for other in ranks):
            rank = replace(rank, trouble=WELL, num_failures=0)
        return rank if rank.has_met else replace(rank, heard=(), began=0)


def _last(ranks, number):
    """The ranks where the attempt of one is the last to have begun."""
    order = sorted({other.began for place, other in enumerate(ranks) if place != number})
    return tuple(
        replace(other, began=len(order) if place == number else order.index(other.began))
        for place, other in enumerate(ranks)
    )


class _All:
    """Of a process that has used every corner."""

    def __contains__(self, _):
        return True

    def add(self, _):
        pass
