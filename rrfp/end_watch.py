"""Says what a rank cannot raise: that the run has ended while a stage of this rank goes on.

A step that ends elsewhere is raised here when the task under way returns. One that waits in a
collective of its own for a rank that has gone returns when the process group's time is over, half
an hour unless it was made with less, and rrfp cannot end that wait.
"""

import logging
import sys
import threading
import time
import traceback

from rrfp.errors import error_from_status

logger = logging.getLogger("rrfp")

_LOOK_EVERY_S = 1.0
_LATE_S = 3.0  # since the end was seen; most tasks return sooner
_NUM_FRAMES = 6
_JOIN_S = 1.0


class EndWatch:
    """A thread that looks once a second until it is closed, and says it once.

    ``unraised_end`` (a weak reference to it) returns (status of the core, what the rank does, the
    number of the thread that does it) while a step goes on although the run has ended, else None.
    """

    def __init__(self, unraised_end):
        self._unraised_end = unraised_end
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="rrfp end watch", daemon=True)
        self._thread.start()

    def close(self):
        self._closed.set()
        if self._thread is not threading.current_thread():  # where a stage was collected there
            self._thread.join(_JOIN_S)

    def _watch(self):
        ended_s = None
        while not self._closed.wait(_LOOK_EVERY_S):
            ask = self._unraised_end()
            if ask is None:
                return  # the session is gone
            end = ask()
            del ask
            now_s = time.monotonic()
            if end is None:
                ended_s = None
            elif ended_s is None:
                ended_s = now_s
            elif now_s >= ended_s + _LATE_S:
                _say(*end)
                return


def _say(status, doing, thread):
    error = error_from_status(*status)
    frame = sys._current_frames().get(thread)
    frames = traceback.format_stack(frame)[-_NUM_FRAMES:] if frame is not None else []
    logger.error(
        "the run has ended, which this rank can raise only when its stage returns: %s. What ended "
        "the run:\n%s: %s\nIf the stage waits for a rank that has gone, in a collective of its "
        "own, it returns when the time-out of that process group is over (timeout= of "
        "torch.distributed.new_group and init_process_group). The thread is in:\n%s",
        doing, type(error).__name__, error, "".join(frames),
    )
