"""What a rank of a fault test does to itself, and when: the plan, the events, the deeds.

The plan (JSON): mode, num_ranks, fault, and where: rank, step, microbatch. ``fault`` is a deed and
a point, such as ``kill-F``: points inside of tasks are F, B (also the input gradient where it is
split), W, loss and hook, those outside are setup and between.
"""

import contextlib
import json
import os
import resource
import signal
import socket
import sys
import time
from types import SimpleNamespace

import torch

PLAN = {
    "steps": 3,
    "microbatches": 4,
    "rank": 0,
    "step": 1,
    "microbatch": 2,
    "task_s": 0.0,
    "stall_timeout_s": 20.0,
    "again": False,
    "group": False,
    "width": 4,
    "options": {},
}
HERE = SimpleNamespace(rank=0, step=0, first=set(), hooked={}, own_sockets=set())


def say(event, **values):
    line = json.dumps({"event": event, "time_s": time.monotonic(), "step": HERE.step, **values})
    os.write(1, (line + "\n").encode())


def is_mine(stage):
    """In one process the plan's rank is the stage; else it is the process."""
    return PLAN["rank"] == (stage if PLAN["mode"] == "threads" else HERE.rank)


def strike(point, stage, microbatch):
    """Called at the points inside of tasks: does the deed when it is this task's turn."""
    deed, _, where = PLAN["fault"].partition("-")
    if where == point and is_mine(stage):
        if (PLAN["step"], PLAN["microbatch"]) == (HERE.step, microbatch):
            say("fault")
            DEEDS[deed](f"{point} of stage {stage}")
    if PLAN["task_s"]:
        time.sleep(PLAN["task_s"])


def strike_outside(point):
    """The same between steps, and in the middle of the set-up."""
    deed, _, where = PLAN["fault"].partition("-")
    if where == point and is_mine(HERE.rank) and PLAN["step"] == HERE.step:
        if deed in DEEDS:
            say("fault")
            DEEDS[deed](point)


def hook_of(stage):
    """A gradient hook of a parameter, which runs in B or W; the n-th call is of microbatch n."""

    def hook(parameter):
        key = (stage, HERE.step)
        count = HERE.hooked[key] = HERE.hooked.get(key, -1) + 1
        strike("W", stage, count)
        strike("hook", stage, count)

    return hook


def _raise(where):
    raise RuntimeError(f"broken on purpose in {where}")


def _exhaust(where):
    bytearray(1 << 62)  # MemoryError


def _exhaust_torch(where):
    torch.empty(1 << 62, dtype=torch.uint8)  # the allocator's own error


def _signal_self(number):
    return lambda where: os.kill(os.getpid(), number)


def _exit(where):
    raise SystemExit(5)


def _sleep(where):
    time.sleep(PLAN["long_s"])


def _pause(where):
    """Stopped for a second, and woken by a child that was not."""
    child = os.fork()
    if child == 0:
        time.sleep(1.0)
        os.kill(os.getppid(), signal.SIGCONT)
        os._exit(0)
    os.kill(os.getpid(), signal.SIGSTOP)
    os.waitpid(child, 0)


def _cut(where):
    """Every connection of rrfp is shut down, as by a firewall that resets them."""
    for descriptor in connected_sockets() - HERE.own_sockets:
        with contextlib.suppress(OSError):  # rrfp closes the rest when it sees the first
            with socket.socket(fileno=os.dup(descriptor)) as connection:
                connection.shutdown(socket.SHUT_RDWR)


def _starve(where):
    """No more memory than this process has now, but for a little."""
    with open("/proc/self/statm") as file:
        bytes_now = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (bytes_now + (8 << 20), resource.RLIM_INFINITY))


def _fill(where):
    """Shared memory is full: no file, so no segment either, may grow beyond a mebibyte."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))


DEEDS = {
    "raise": _raise,
    "memory": _exhaust,
    "allocator": _exhaust_torch,
    "kill": _signal_self(signal.SIGKILL),
    "terminate": _signal_self(signal.SIGTERM),
    "interrupt": _signal_self(signal.SIGINT),
    "freeze": _signal_self(signal.SIGSTOP),
    "pause": _pause,
    "exit": _exit,
    "long": _sleep,
    "absent": lambda where: time.sleep(3600),
    "leave": lambda where: sys.exit(0),
    "cut": _cut,
    "starve": _starve,
    "fill": _fill,
}


def connected_sockets():
    """Descriptors of this process that are connected sockets."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as candidate:
                candidate.getpeername()
            found.add(int(name))
        except OSError:
            continue
    return found


def left_over():
    """What a session that has ended must not leave in this process."""
    names = []
    for thread in os.listdir("/proc/self/task"):
        try:
            with open(f"/proc/self/task/{thread}/comm") as file:
                names.append(file.read())
        except (FileNotFoundError, ProcessLookupError):
            continue  # one that was joined is listed until the system has ended it
    with open("/proc/self/maps") as file:
        segments = sum("memfd:rrfp" in line for line in file)
    return {
        "connections": len(connected_sockets() - HERE.own_sockets),
        "threads": sum("rrfp" in name for name in names),
        "segments": segments,
    }


def leave_together():
    """Rank 0, which holds the store, goes last. A barrier is no use: gloo may end it with an error
    on one rank when another has left it and closed its connections."""
    store = torch.distributed.distributed_c10d._get_default_store()
    store.set(f"done/{HERE.rank}", "")
    if HERE.rank == 0:
        store.wait([f"done/{rank}" for rank in range(PLAN["num_ranks"])])
    torch.distributed.destroy_process_group()


def fork_between():
    """Faults of forked children, before step HERE.step."""
    if PLAN["rank"] != HERE.rank or PLAN["step"] != HERE.step:
        return
    if PLAN["fault"] == "fork-kill":
        child = os.fork()
        if child == 0:
            time.sleep(3600)
            os._exit(0)
        say("fault", child=child)
        os.kill(os.getpid(), signal.SIGKILL)
    if PLAN["fault"] == "fork-use":
        use_in_child()


def use_in_child():
    """A forked child that calls rrfp must be told, not hang."""
    import rrfp

    child = os.fork()
    if child == 0:
        try:
            ones = [torch.ones(1, 4)]
            rrfp.run_pipeline([torch.nn.Linear(4, 4)], ones, ones, torch.nn.functional.mse_loss)
        except rrfp.RrfpError as error:
            say("child refused", text=str(error))
            os._exit(7)
        except BaseException as error:
            say("child raised", text=repr(error))
            os._exit(8)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    say("child", code=os.waitstatus_to_exitcode(status))
