"""How the processes of a pipeline find one another, through torch.distributed's store.

Every rank publishes what it is (addresses, stages, or why it cannot take part); every rank
reads all of it and judges it by the same rules, so that all raise the same error. Rank 0 draws
the token with which connections prove that they belong to the run.
"""

import contextlib
import os
import pickle
import secrets
import time
from dataclasses import dataclass

import torch

from rrfp import _C
from rrfp.errors import PeerLostError, RankTimeoutError

_POLL_S = 0.005
_GIVEN_UP = "given up"  # a key: by a rank whose time was over


@dataclass(frozen=True)
class Membership:
    """This process in a process group."""

    rank: int
    ranks: tuple  # global ranks of the group, by rank in it

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
    return Membership(rank, tuple(dist.get_process_group_ranks(group)))


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
    """One set-up: a corner of the store that only these ranks use, and only this time."""

    def __init__(self, member, timeout_s, purpose="pipeline"):
        self.member = member
        self._timeout_s = timeout_s
        self._end = time.monotonic() + timeout_s
        store = torch.distributed.distributed_c10d._get_default_store()
        # The purpose keeps counts apart: who forms an agreement group of these ranks by mistake
        # is not ahead of the others when they set up a pipeline.
        corner = f"rrfp/{purpose}/{','.join(map(str, member.ranks))}"
        self._counts = [count_key(corner, rank) for rank in range(member.num_ranks)]
        self._shared = store
        with self.store_reachable():
            # Counted in the store and not here: a process that takes a dead one's place has not
            # seen the set-ups before it.
            generation = store.add(self._counts[member.rank], 1)
        self._num_exchanges = 0
        self.corner = f"{corner}/{generation}"
        self._store = torch.distributed.PrefixStore(self.corner, store)

    def exchange(self, card):
        """Publish this rank's card (a dict) and return those of all ranks, by rank.

        May be called again, by all ranks alike.

        Raises:
            RankTimeoutError: A rank did not publish in time.
        """
        member = self.member
        card = {
            **card,
            "version": _C.build_info()["version"],
        }
        prefix = f"{self._num_exchanges}/rank"
        self._num_exchanges += 1
        with self.store_reachable():
            if member.rank == 0 and self._num_exchanges == 1:
                token = pickle.dumps((secrets.token_bytes(32), secrets.randbits(63)))
                self._store.set("token", token)
            self._store.set(f"{prefix}{member.rank}", pickle.dumps(card))
            self._check_given_up()
            return [self._get(f"{prefix}{rank}", rank) for rank in range(member.num_ranks)]

    def publish(self, name, value):
        """Say something under a name, once per attempt, without waiting for anybody."""
        with self.store_reachable():
            self._store.set(f"{name}/{self.member.rank}", pickle.dumps(value))

    def share(self, name, value, watch=None):
        """As ``publish``; what every rank has said under the name, by rank.

        ``watch`` is called while this rank waits for another, and may raise.

        Raises:
            RankTimeoutError: A rank said nothing in time.
        """
        self.publish(name, value)
        with self.store_reachable():
            return [
                self._get(f"{name}/{rank}", rank, watch) for rank in range(self.member.num_ranks)
            ]

    def token(self):
        """(run token, run number) drawn by rank 0."""
        with self.store_reachable():
            return self._get("token", 0)

    def ranks_ahead(self):
        """Ranks that have begun a set-up of these ranks which this rank has not begun yet."""
        with self.store_reachable():
            counts = [self._shared.add(key, 0) for key in self._counts]
        return [rank for rank, count in enumerate(counts) if count > counts[self.member.rank]]

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

    def _get(self, key, rank, watch=None):
        # Asked again and again rather than waited for: a wait in the store hears no Ctrl-C.
        while not self._store.check([key]):
            self._check_given_up()
            if time.monotonic() >= self._end:
                text = (
                    f"rank {rank} (global rank {self.member.ranks[rank]}) did not join the "
                    f"pipeline within {self._timeout_s:g} s, seen from rank {self.member.rank}. "
                    "Check that it runs and calls rrfp as often as the others."
                )
                # Who comes later must not take this rank's card for that of one who still waits.
                self._store.set(_GIVEN_UP, pickle.dumps((rank, text)))
                raise RankTimeoutError(text, rank=rank)
            if watch is not None:
                watch()
            time.sleep(_POLL_S)
        return pickle.loads(self._store.get(key))


    def _check_given_up(self):
        if self._store.check([_GIVEN_UP]):
            rank, text = pickle.loads(self._store.get(_GIVEN_UP))
            raise RankTimeoutError(f"this set-up has been given up: {text}", rank=rank)


class RanksParted(ValueError):
    """Some ranks set up a pipeline while others wait for them in a step of an earlier one."""


# By the name that travels.
_REFUSALS = {"RanksParted": RanksParted, "TypeError": TypeError}


def check_cards(cards, shape):
    """Refuse ranks that cannot form a pipeline.

    Raises:
        ValueError, TypeError: What a rank said was wrong, or two versions.
    """
    for rank, card in enumerate(cards):
        if card.get("error"):
            name, text = card["error"]
            raise _REFUSALS.get(name, ValueError)(f"rank {rank}: {text}")
    for name, words in (
        ("version", "versions of rrfp; install the same one everywhere"),
        *((name, f"values of {name}; pass the same one on every rank") for name in shape),
        ("agreement", "agreement groups; give one of the same size to every rank, or none"),
    ):
        for rank, card in enumerate(cards):
            if card[name] != cards[0][name]:
                raise ValueError(
                    f"the ranks have different {words}: rank 0 has {cards[0][name]!r}, rank "
                    f"{rank} has {card[name]!r}."
                )
