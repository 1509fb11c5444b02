"""Whether a thread can be begun in a step."""

import mmap

_ROOM_BYTES = 1 << 20


def check_room():
    """Before ``Thread.start()``, which waits without a bound for a thread that has died of no
    memory before it could say that it runs.

    Raises:
        OSError: There is next to none.
    """
    mmap.mmap(-1, _ROOM_BYTES).close()  # not of what malloc has kept: a new thread has none of it
