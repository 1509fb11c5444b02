"""Messages that come late, out of order, or never: a seam around one rank's runtime, for tests.

The worker itself holds each output back for a seeded time and hands it over at one of its next
claims, so rrfp's own threads see nothing unusual but a slow network.
"""

import contextlib
import heapq
import itertools
import random
import time
from unittest import mock

from rrfp import _C


class LateRuntime:
    """Wraps a Runtime; ``drop(task_index)`` true: that output is never sent."""

    def __init__(self, runtime, seed, late_s, drop=lambda local: False):
        self.runtime = runtime
        self.rng = random.Random(seed)
        self.late_s = late_s
        self.drop = drop
        self.pending = []  # heap of (due, number, post, args)
        self.numbers = itertools.count()
        self.delayed = self.reordered = 0
        self.newest = -1

    def __getattr__(self, name):
        return getattr(self.runtime, name)

    def hold(self, post, local, *args):
        if self.drop(local):
            return
        delay_s = self.rng.choice([0.0, self.rng.uniform(0, self.late_s)])
        self.delayed += delay_s > 0
        due = time.monotonic() + delay_s
        heapq.heappush(self.pending, (due, next(self.numbers), post, (local, *args)))
        self.flush()

    def post_object(self, *args):
        self.hold(self.runtime.post_object, *args)

    def post_tensors(self, *args):
        self.hold(self.runtime.post_tensors, *args)

    def flush(self, everything=False):
        while self.pending and (everything or self.pending[0][0] <= time.monotonic()):
            due, number, post, args = heapq.heappop(self.pending)
            if everything:
                time.sleep(max(0.0, due - time.monotonic()))
            self.reordered += number < self.newest
            self.newest = max(self.newest, number)
            post(*args)

    def claim(self, timeout_ms):
        deadline = time.monotonic() + timeout_ms / 1000
        while self.pending:
            self.flush()
            local = self.runtime.claim(1)
            if local == _C.ALL_CLAIMED:
                self.flush(everything=True)
            if local != _C.CLAIMED_NOTHING:
                return local
            if time.monotonic() > deadline:
                return local
        return self.runtime.claim(timeout_ms)


@contextlib.contextmanager
def late_runtimes(seed, late_s=0.004, drop=lambda rank, local: False):
    """Pipelines built inside have late messages; yields the list of their runtimes."""
    made = []

    def wrap(runtime):
        rank = runtime.rank
        made.append(LateRuntime(runtime, seed + rank, late_s, lambda local: drop(rank, local)))
        return made[-1]

    local, join = _C.make_local_runtimes, _C.join_control
    with (
        mock.patch.object(
            _C, "make_local_runtimes", lambda *a, **k: [wrap(r) for r in local(*a, **k)]
        ),
        mock.patch.object(_C, "join_control", lambda *a, **k: wrap(join(*a, **k))),
    ):
        yield made
