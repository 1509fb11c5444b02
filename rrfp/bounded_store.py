"""A store whose calls end in time: torch's wait for ever once the process that holds it freezes."""

import queue
import threading
import time
import weakref

# Of a call that begins when the time is over; a store that answers does so in milliseconds.
_LEAST_S = 1.0


class StoreSilentError(Exception):
    """The store did not answer in time."""


class BoundedStore:
    """Calls of a store that return, or raise StoreSilentError, by ``end_s`` (time.monotonic()).

    They run in a thread of this object, so Ctrl-C is heard meanwhile.
    """

    def __init__(self, store, end_s):
        self._end_s = end_s
        self._is_silent = False
        self._calls = queue.SimpleQueue()
        threading.Thread(
            target=_serve, args=(store, self._calls), name="rrfp store", daemon=True
        ).start()
        self.close = weakref.finalize(self, self._calls.put, None)
        self.close.atexit = False

    def add(self, key, amount):
        return self._ask("add", key, amount)

    def set(self, key, value):
        self._ask("set", key, value)

    def get(self, key):
        return self._ask("get", key)

    def check(self, keys):
        return self._ask("check", keys)

    def compare_set(self, key, expected, value):
        return self._ask("compare_set", key, expected, value)

    def _ask(self, name, *args):
        if self._is_silent:
            raise StoreSilentError
        answer = queue.SimpleQueue()
        self._calls.put((name, args, answer))
        try:
            value, error = answer.get(timeout=max(_LEAST_S, self._end_s - time.monotonic()))
        except queue.Empty:
            self._is_silent = True
            raise StoreSilentError from None
        if error is not None:
            raise error
        return value


def _serve(store, calls):
    for name, args, answer in iter(calls.get, None):
        try:
            answer.put((getattr(store, name)(*args), None))
        except Exception as error:
            answer.put((None, error))
