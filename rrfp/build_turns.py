"""Threads of one process that set up pipelines of the same ranks do so one after the other."""

import contextlib
import os
import threading
import time
import weakref

from rrfp.errors import RankTimeoutError, RrfpError

_POLL_S = 0.005


class _Turn:
    """Of one call, which alone holds it: where Ctrl-C comes before it is over, it is gone."""

    def __init__(self):
        self.thread = threading.get_ident()
        self.is_over = False


_turns = weakref.WeakValueDictionary()  # by place: the last
_claiming = threading.RLock()


def _forget_turns():
    """In a forked child: those of its parent's threads."""
    global _claiming
    _turns.clear()
    _claiming = threading.RLock()


os.register_at_fork(after_in_child=_forget_turns)


def _claim(place, turn):
    """The turn that is under way; None: the given one is, from now on."""
    with _claiming:
        last = _turns.get(place)
        if last is not None and last is not turn and not last.is_over:
            return last
        _turns[place] = turn
    return None


@contextlib.contextmanager
def build_turn(place, timeout_s):
    """Inside, no other thread is in the turn of this place. Yields what is left of the time.

    Raises:
        RankTimeoutError: Another was, all that time.
        RrfpError: This very thread is, below a signal handler or a finalizer.
    """
    turn, end_s, left_s = _Turn(), time.monotonic() + timeout_s, timeout_s
    try:
        while (other := _claim(place, turn)) is not None:
            if other.thread == turn.thread:
                raise RrfpError(
                    "run_pipeline was called while the same thread sets a pipeline of these ranks "
                    "up, by a signal handler or a finalizer; call it when that set-up is over."
                )
            left_s = round(end_s - time.monotonic(), 1)  # as an error is to show it
            if left_s <= 0:
                raise RankTimeoutError(
                    f"another thread of this process was setting up a pipeline of the same ranks "
                    f"for all of {timeout_s:g} s; this call did not come to its own."
                )
            del other  # the loop keeps no turn alive
            time.sleep(_POLL_S)
        yield left_s
    finally:
        turn.is_over = True
