"""A store whose calls end in time: torch's wait for ever once the process that holds it freezes."""

import contextlib
import os
import queue
import threading
import time
import weakref

_EXIT_WAIT_S = 2.0  # for calls under way; one that a frozen store keeps does not come back anyway

# Of a call that begins when the time is over; a store that answers does so in milliseconds.
_LEAST_S = 1.0


class StoreSilentError(Exception):
    """The store did not answer in time."""


class ProgramEndsError(StoreSilentError):
    """It is not asked any more."""


_changed = threading.Condition()
_num_calls = 0
_are_over = False


@contextlib.contextmanager
def store_call():
    """Around each call of a store in a thread of rrfp's own.

    Raises:
        ProgramEndsError: The program is ending.
    """
    global _num_calls
    with _changed:
        if _are_over:
            raise ProgramEndsError
        _num_calls += 1
    try:
        yield
    finally:
        with _changed:
            _num_calls -= 1
            _changed.notify_all()


def end_store_calls():
    """At exit: lets the calls under way come back, and no other begin.

    A thread that comes back from torch while the interpreter ends is unwound through destructors
    of torch's, which aborts the process in place of its exit status (csrc/python/gil.hpp).
    """
    global _are_over
    with _changed:
        _are_over = True
        _changed.wait_for(lambda: _num_calls == 0, timeout=_EXIT_WAIT_S)


def _forget_calls():
    """In a forked child: those of its parent, and a lock that a thread of the parent may hold."""
    global _changed, _num_calls
    _changed, _num_calls = threading.Condition(), 0


os.register_at_fork(after_in_child=_forget_calls)


class BoundedStore:
    """Calls of a store that return, or raise StoreSilentError, by ``end_s`` (time.monotonic()).

    They run in a thread of this object, so Ctrl-C is heard meanwhile.
    """

    def __init__(self, store, end_s):
        self._end_s = end_s
        self._is_silent = False
        self._calls = queue.SimpleQueue()
        self.close = weakref.finalize(self, self._calls.put, None)  # first: Ctrl-C may come below
        self.close.atexit = False
        threading.Thread(
            target=_serve, args=(store, self._calls), name="rrfp store", daemon=True
        ).start()

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
            with store_call():
                value = getattr(store, name)(*args)
            answer.put((value, None))
        except Exception as error:
            answer.put((None, error))
