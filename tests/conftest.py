"""Markers, the seed, and the watchdog of the whole suite."""

import faulthandler
import os
import signal
import threading

import pytest

DEFAULT_LIMIT_S = 600
# These build in one folder, so one process takes them all where several share the suite out
# (pytest -n). It begins with them: the compiler is busy while other tests wait for time-outs.
BUILDING = ("test_cpp.py", "test_cuda_build.py", "test_build.py")
# Then those that take longest, so that what is begun last is short.
LONGEST = (
    "test_faults.py", "test_split_backward.py", "test_gpt_scripts.py", "test_vision_text.py",
    "test_train_job.py", "test_two_hosts.py", "test_parity.py", "test_training_loop.py",
    "test_errors_surface.py", "test_parted_ranks.py", "test_deterministic.py",
    "test_graph_cover.py", "test_models.py", "test_tied.py", "test_add_in_products.py",
)

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


def place_in_order(item):
    order = BUILDING + LONGEST
    return order.index(item.path.name) if item.path.name in order else len(order)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class FilesInOrder(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            file = nodeid.split("::", 1)[0]
            return "building" if file.endswith(BUILDING) else file

    config.option.loadscopereorder = False  # not by how many tests a file has
    return FilesInOrder(config, log)


def pytest_collection_modifyitems(config, items):
    items.sort(key=place_in_order)
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
