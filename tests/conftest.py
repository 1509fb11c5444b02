"""Markers, the seed, and the watchdog of the whole suite."""

import faulthandler
import os
import signal
import threading

import pytest

DEFAULT_LIMIT_S = 600

# A shell without job control starts background commands with SIGINT ignored, and every process of
# a test would inherit that: Ctrl-C is part of what is tested.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config):
    config.addinivalue_line("markers", "time_limit(seconds): longer than the usual watchdog")


def suite_seed():
    return int(os.environ.get("RRFP_SEED", "20260518"))


def pytest_report_header(config):
    return f"seed: {suite_seed()} (RRFP_SEED repeats a run)"


@pytest.fixture(scope="session")
def seed():
    return suite_seed()


def pytest_collection_modifyitems(config, items):
    if config.getoption("-m"):
        return
    skip = pytest.mark.skip(reason="takes minutes; run with -m slow")
    for item in items:
        if item.get_closest_marker("slow"):  # keywords would name the folders of the path too
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def watchdog(request):
    """A test that hangs fails by name; one that does not even react to that ends the run with
    the stacks of all threads, rather than never."""
    marker = request.node.get_closest_marker("time_limit")
    limit_s = marker.args[0] if marker else DEFAULT_LIMIT_S
    if request.node.get_closest_marker("slow") and not marker:
        limit_s = 3600

    def expired(signum, frame):
        faulthandler.dump_traceback(all_threads=True)
        raise TimeoutError(f"{request.node.nodeid} ran longer than {limit_s} s")

    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError("the suite expects pytest in the main thread: its watchdog is an alarm")
    before = signal.signal(signal.SIGALRM, expired)
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    faulthandler.dump_traceback_later(limit_s + 60, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)
