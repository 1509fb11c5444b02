"""One attempt to set up, operation by operation: the store and the clock that it sees.

What it has been answered so far is repeated; it performs one operation more, and stops.
"""

from rrfp.errors import RankTimeoutError

TIMEOUT_S = 100.0
SLEPT, LEFT, CONNECTING = "slept", "left", "connecting"  # among what an attempt has heard


class Pause(BaseException):
    """The attempt has done its one operation more."""


class Leave(BaseException):
    """As a Ctrl-C."""


class NoError(Exception):
    pass


class Attempt:
    """One run of an attempt: the store and the clock that it sees."""

    def __init__(self, heard, store, now_s, leaves):
        self.heard, self.values = list(heard), dict(store)
        self._now_s, self._leaves = now_s, leaves
        self._place, self._has_begun, self._may_do, self._has_paused = 0, False, True, False

    def _ask(self, answer, is_shared=True):
        if self._has_paused:  # who leaves may want to say so
            raise Pause
        self._place += 1
        if self._place > len(self.heard):
            if is_shared and not self._may_do:
                self._pause()
            self._may_do = self._may_do and not is_shared
            self.heard.append(LEFT if is_shared and self._leaves else answer())
        if self.heard[self._place - 1] == LEFT:
            raise Leave
        return self.heard[self._place - 1]

    def add(self, key, amount):
        def added():
            self.values[key] = self.values.get(key, 0) + amount
            return self.values[key]

        return self._ask(added, is_shared=False)  # each rank counts for itself

    def set(self, key, value):
        self._ask(lambda: self.values.__setitem__(key, value))

    # What is there stays there, so that it makes no difference when a rank looks.

    def check(self, keys):
        are_there = all(key in self.values for key in keys)
        return self._ask(lambda: are_there, is_shared=not are_there)

    def get(self, key):
        return self._ask(lambda: self.values[key], is_shared=False)

    def compare_set(self, key, expected, value):
        is_there = key in self.values
        return self._ask(lambda: self.values.setdefault(key, value), is_shared=not is_there)

    def close(self):
        pass

    def monotonic(self):
        if not self._has_begun:
            self._has_begun = True
            return 0.0

        def read():
            now_s, self._now_s = self._now_s, None
            return now_s or 0.0

        return self._ask(read)

    def connect(self, corner, number, num_ranks):
        """As the core, which knows nothing of the store: all are there, or the time is over."""
        self._ask(lambda: CONNECTING, is_shared=False)
        self.set(f"{corner}/connects/{number}", True)
        while not self.check([f"{corner}/connects/{rank}" for rank in range(num_ranks)]):
            if self.monotonic() >= TIMEOUT_S:
                raise RankTimeoutError("not connected")
            self.sleep(None)

    @property
    def has_read_the_clock(self):
        return self._now_s is None

    def sleep(self, _):
        self._ask(lambda: SLEPT, is_shared=False)
        if self._place < len(self.heard):
            return
        slept = [index for index, answer in enumerate(self.heard) if answer == SLEPT]
        began = slept[-2] + 1 if len(slept) > 1 else 0
        if began and not any(self.heard[began:-1]):  # nothing had come: where it was before
            del self.heard[began:]
            self._pause()

    def _pause(self):
        self._has_paused = True
        raise Pause
