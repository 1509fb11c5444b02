"""Ranks that name different agreement groups find out, instead of waiting for one another.

Members of a group are in different pipelines, and a rank that was given a wrong group waits where
nobody comes, as do those that wait for it. So each tells every rank that it names which group it
is forming, and looks from time to time who names it.
"""

import pickle
import time

from rrfp.rendezvous import count_key

_LOOK_S = 0.05
# A rank that forms two groups one after the other is named by the second while it waits for the
# first, if the others are quick: for so long that is no mistake.
_GRACE_S = 1.0


class GroupClaims:
    """The groups that name this rank while it forms its own; one attempt.

    Everything is in the store of torch.distributed, so a process that takes another's place finds
    it. Times are of the host's clock, which the members of a group share.
    """

    def __init__(self, member, corner, store):
        self._own_rank = member.ranks[member.rank]
        self._ranks = member.ranks
        self._store = store
        self._last_end_s = self._read(f"rrfp/group formed by {self._own_rank}/ended", 0.0)
        self._num_read = 0
        self._rivals = {}  # key: when it was first seen
        self._next_look_s = 0.0
        claim = {"rank": self._own_rank, "ranks": self._ranks, "corner": corner, "failed_s": None}
        self._claim = claim
        self._tell(None, self._read(self._keys_name(), []))  # of an attempt that failed
        self._keys = [self._new_key(rank) for rank in self._ranks if rank != self._own_rank]
        self._tell(claim, self._keys)
        self._write(self._keys_name(), self._keys)

    def end(self, has_failed):
        """This rank is not forming a group any more."""
        now_s = time.time()
        self._tell({**self._claim, "failed_s": now_s} if has_failed else None, self._keys)
        self._write(f"rrfp/group formed by {self._own_rank}/ended", now_s)

    def others(self):
        """Claims of other groups on this rank."""
        self._look()
        return [claim for key in self._rivals if (claim := self._rival(key)) is not None]

    def rival(self):
        """The claim of another group that has stood too long to be well, or None.

        Cheap: it looks into the store a few times a second at most.
        """
        now_s = time.monotonic()
        if now_s < self._next_look_s:
            return None
        self._next_look_s = now_s + _LOOK_S
        self._look()
        for key, since_s in list(self._rivals.items()):
            claim = self._rival(key)
            if claim is None:
                del self._rivals[key]
            elif now_s >= since_s + _GRACE_S:
                return claim
        return None

    def refuse(self, claim, text):
        """Tell those who form the group of ``claim`` that this rank will not come."""
        place = claim["ranks"].index(self._own_rank)
        self._store.set(f"{claim['corner']}/card/{place}", pickle.dumps({"error": text}))
        # It counts as a set-up of this rank, which the next one of that group comes after.
        group, generation = claim["corner"].rsplit("/", 1)
        num_set_ups = count_key(group, place)
        num_behind = int(generation) - self._store.add(num_set_ups, 0)
        if num_behind > 0:
            self._store.add(num_set_ups, num_behind)

    def _look(self):
        name = self._claims_name(self._own_rank)
        while self._num_read < self._store.add(name, 0):
            key = f"{name}/{self._num_read + 1}"
            if not self._store.check([key]):
                return  # it is being written
            self._num_read += 1
            if self._rival(key) is not None:
                self._rivals[key] = time.monotonic()

    def _rival(self, key):
        claim = self._read(key, None)
        if claim is None or claim["ranks"] == self._ranks:
            return None
        failed_s = claim["failed_s"]
        return claim if failed_s is None or failed_s > self._last_end_s else None

    @staticmethod
    def _claims_name(rank):
        return f"rrfp/groups that name {rank}"

    def _keys_name(self):
        return f"rrfp/group formed by {self._own_rank}/told"

    def _new_key(self, rank):
        name = self._claims_name(rank)
        return f"{name}/{self._store.add(name, 1)}"

    def _tell(self, claim, keys):
        for key in keys:
            self._write(key, claim)

    def _write(self, key, value):
        self._store.set(key, pickle.dumps(value))

    def _read(self, key, otherwise):
        return pickle.loads(self._store.get(key)) if self._store.check([key]) else otherwise
