"""rrfp's threads that come and go, which a count of what a process holds should wait for."""

import os
import threading
import time

# The guard of hint "auto" learns from a step; a wait that takes long looks into the store.
NAMES = ("rrfp-guard", "rrfp set-up look")


def wait_for_passing_threads():
    for thread in threading.enumerate():
        if thread.name in NAMES:
            thread.join(10.0)


def num_threads():
    """The least of several looks: a thread that was joined is still listed for a moment."""
    found = []
    for _ in range(20):
        found.append(len(os.listdir("/proc/self/task")))
        time.sleep(0.005)
    return min(found)
