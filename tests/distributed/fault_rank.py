"""The processes of a fault test: each trains a few steps and does to itself what the plan says.

The plan (JSON): mode, num_ranks, fault, and where: rank, step, microbatch. Events are printed as
JSON lines with the monotonic clock, which all processes of a host share. Run by launch.py, which
asks for one forked process per rank: see ``serve_forks``.
"""

import contextlib
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "python"))

import torch
import torch.distributed as dist
from torch import nn

PLAN = {
    "steps": 3,
    "microbatches": 4,
    "rank": 0,
    "step": 1,
    "microbatch": 2,
    "task_s": 0.0,
    "stall_timeout_s": 20.0,
    "again": False,
    "options": {},
}
RANK = 0
STEP = [0]
WIDTH = 4


def say(event, **values):
    line = json.dumps({"event": event, "time_s": time.monotonic(), "step": STEP[0], **values})
    os.write(1, (line + "\n").encode())


def is_here(point, stage, microbatch):
    """Whether the plan's fault happens now."""
    wanted = (PLAN["fault"], PLAN["rank"], PLAN["step"], PLAN["microbatch"])
    return wanted == (point, stage, STEP[0], microbatch)


def strike(kind, stage, microbatch):
    """Called inside the tasks: raises, dies, or sleeps when it is this task's turn."""
    if is_here(f"raise-{kind}", stage, microbatch):
        say("fault")
        raise RuntimeError(f"broken on purpose in {kind} of stage {stage}")
    if is_here(f"kill-{kind}", stage, microbatch):
        say("fault")
        os.kill(os.getpid(), signal.SIGKILL)
    if is_here(f"exit-{kind}", stage, microbatch):
        say("fault")
        raise SystemExit(5)
    if is_here(f"long-{kind}", stage, microbatch):
        say("long task")
        time.sleep(PLAN["long_s"])
    if PLAN["task_s"]:
        time.sleep(PLAN["task_s"])


class Mark(torch.autograd.Function):
    """Identity whose backward is where faults of B happen."""

    @staticmethod
    def forward(ctx, hidden, stage, microbatch):
        ctx.where = (stage, microbatch)
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx, gradient):
        strike("B", *ctx.where)
        return gradient, None, None


class Stage(nn.Module):
    def __init__(self, index):
        super().__init__()
        generator = torch.Generator().manual_seed(index)
        self.index = index
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, generator=generator))

    def forward(self, hidden, microbatch):
        if self.index == PLAN["rank"] or PLAN["mode"] == "threads":
            say_first_task()
        strike("F", self.index, microbatch)
        return Mark.apply(torch.tanh(hidden @ self.weight), self.index, microbatch), microbatch


FIRST = set()


def say_first_task():
    if STEP[0] not in FIRST:
        FIRST.add(STEP[0])
        say("in step")


def loss_fn(output, target):
    strike("loss", PLAN["num_ranks"] - 1, output[1])
    return (output[0] - target).square().mean()


def between_steps():
    """Faults that happen outside of tasks, before step STEP."""
    if PLAN["rank"] != RANK or PLAN["step"] != STEP[0]:
        return
    fault = PLAN["fault"]
    if fault == "kill-between":
        say("fault")
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "leave":
        say("fault")
        sys.exit(0)
    if fault == "absent":
        say("fault")
        time.sleep(3600)
    if fault == "fork-kill":
        child = os.fork()
        if child == 0:
            time.sleep(3600)
            os._exit(0)
        say("fault", child=child)
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "fork-use":
        use_in_child()


def use_in_child():
    """A forked child that calls rrfp must be told, not hang."""
    import rrfp

    child = os.fork()
    if child == 0:
        try:
            rrfp.run_pipeline(
                [Stage(0)], [(torch.ones(1, WIDTH), 0)], [torch.ones(1, WIDTH)], loss_fn
            )
        except rrfp.RrfpError as error:
            say("child refused", text=str(error))
            os._exit(7)
        except BaseException as error:
            say("child raised", text=repr(error))
            os._exit(8)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    say("child", code=os.waitstatus_to_exitcode(status))


def is_dropped(rank, local):
    """The stall's seam: one forward's output is computed and never sent. A rank's forwards are
    its tasks 0 to M - 1."""
    return (PLAN["fault"], rank, STEP[0], local) == (
        "drop",
        PLAN["rank"],
        PLAN["step"],
        PLAN["microbatch"],
    )


def train_step(stages, loader):
    import rrfp

    generator = torch.Generator().manual_seed(STEP[0])
    count, last = PLAN["microbatches"], PLAN["num_ranks"] - 1
    everything = PLAN["mode"] == "threads"
    inputs = [(torch.randn(2, WIDTH, generator=generator), m) for m in range(count)]
    if loader is not None:
        inputs = [(x, m) for m, x in enumerate(loader)]
    targets = [torch.randn(2, WIDTH, generator=generator) for _ in range(count)]
    return rrfp.run_pipeline(
        stages,
        inputs if everything or RANK == 0 else None,
        targets if everything or RANK == last else None,
        loss_fn,
        stall_timeout_s=PLAN["stall_timeout_s"],
        **PLAN["options"],
    )


def make_loader():
    data = torch.randn(2 * PLAN["microbatches"], WIDTH)
    return torch.utils.data.DataLoader(data, batch_size=2, num_workers=1)


def train():
    everything = PLAN["mode"] == "threads"
    stages = [Stage(s) for s in range(PLAN["num_ranks"])] if everything else {RANK: Stage(RANK)}
    loader = None
    while STEP[0] < PLAN["steps"]:
        between_steps()
        if PLAN["fault"] == "loader" and STEP[0] == 1:
            loader = make_loader()
        say("step")
        try:
            train_step(stages, loader)
        except Exception as error:
            attributes = {
                k: v for k, v in vars(error).items() if isinstance(v, (int, str, float, type(None)))
            }
            say(
                "error",
                type=type(error).__name__,
                text=str(error),
                attributes=attributes,
                cause=repr(error.__cause__),
                report=getattr(error, "report", None),
                threads=threading.active_count(),
            )
            if not PLAN["again"]:
                raise
            PLAN["again"] = False
            PLAN["fault"] = "none"
        STEP[0] += 1
    say("done")


def main():
    torch.set_num_threads(1)
    if PLAN["mode"] == "processes":
        dist.init_process_group("gloo")
        dist.barrier()  # the faults begin when the process group is whole
    say("ready")
    with contextlib.ExitStack() as stack:
        if PLAN["fault"] == "drop":
            import parity_late  # imports rrfp, which the forking process must not have

            stack.enter_context(parity_late.late_runtimes(0, 0.0, is_dropped))
        train()
    if PLAN["mode"] == "processes" and PLAN["fault"] != "leave":
        dist.barrier()
        dist.destroy_process_group()


def tell_parent(**values):
    os.write(1, (json.dumps(values) + "\n").encode())


def reap(signum, frame):
    """Says how a rank ended; nobody else can wait for it."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        tell_parent(ended=pid, code=os.waitstatus_to_exitcode(status))


def serve_forks():
    """Forks a rank per request line and returns in the child, so that the time to import torch
    is paid once. The ranks are whole processes otherwise: own session, own interpreter exit."""
    signal.signal(signal.SIGCHLD, reap)
    for line in sys.stdin:
        request = json.loads(line)
        pid = os.fork()
        if pid:
            tell_parent(started=pid)
            continue
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()
        opened = [os.open(os.devnull, os.O_RDONLY)]
        opened += [os.open(request[k], os.O_WRONLY | os.O_CREAT) for k in ("out", "err")]
        for target, descriptor in enumerate(opened):
            os.dup2(descriptor, target)
            os.close(descriptor)
        os.environ.update(request["environment"])
        PLAN.update(request["plan"])
        return True
    return False


if __name__ == "__main__" and serve_forks():
    RANK = int(os.environ["RANK"])
    main()
