"""The processes of a fault test: each trains a few steps and does to itself what the plan says.

Events are printed as JSON lines with the monotonic clock, which all processes of a host share. Run
by launch.py, which asks for one forked process per rank: see ``serve_forks``. With ``group`` in the
plan, four processes are two pipelines of two stages whose ranks agree on their order of tasks.
"""

import contextlib
import gc
import json
import os
import signal
import sys
import threading
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).parents[1] / "python"))

import torch
import torch.distributed as dist
from rank_faults import (
    HERE,
    PLAN,
    connected_sockets,
    fork_between,
    hook_of,
    is_mine,
    left_over,
    leave_together,
    say,
    strike,
    strike_outside,
)
from torch import nn


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
        width = PLAN["width"]
        self.weight = nn.Parameter(torch.randn(width, width, generator=generator))
        self.weight.register_post_accumulate_grad_hook(hook_of(index))

    def forward(self, hidden, microbatch):
        if is_mine(self.index) or PLAN["mode"] == "threads":
            say_first_task()
        strike("F", self.index, microbatch)
        return Mark.apply(torch.tanh(hidden @ self.weight), self.index, microbatch), microbatch


def say_first_task():
    if HERE.step not in HERE.first:
        HERE.first.add(HERE.step)
        say("in step")


def num_stages():
    return PLAN["num_ranks"] // 2 if PLAN["group"] else PLAN["num_ranks"]


def own_stage():
    return HERE.rank // 2 if PLAN["group"] else HERE.rank


def loss_fn(output, target):
    strike("loss", num_stages() - 1, output[1])
    return (output[0] - target).square().mean()


def is_dropped(rank, local):
    """The stall's seam: one forward's output is computed and never sent. A rank's forwards are
    its tasks 0 to M - 1."""
    return (PLAN["fault"], rank, HERE.step, local) == (
        "drop",
        PLAN["rank"],
        PLAN["step"],
        PLAN["microbatch"],
    )


def train_step(stages, loader, mesh):
    import rrfp

    generator = torch.Generator().manual_seed(HERE.step)
    count, width = PLAN["microbatches"], PLAN["width"]
    everything = PLAN["mode"] == "threads"
    inputs = [(torch.randn(2, width, generator=generator), m) for m in range(count)]
    if loader is not None:
        inputs = [(x, m) for m, x in enumerate(loader)]
    targets = [torch.randn(2, width, generator=generator) for _ in range(count)]
    agreement = {} if mesh is None else {"group": mesh, "agreement_group": "auto"}
    return rrfp.run_pipeline(
        stages,
        inputs if everything or own_stage() == 0 else None,
        targets if everything or own_stage() == num_stages() - 1 else None,
        loss_fn,
        stall_timeout_s=PLAN["stall_timeout_s"],
        **agreement,
        **PLAN["options"],
    )


def make_loader():
    data = torch.randn(2 * PLAN["microbatches"], PLAN["width"])
    return torch.utils.data.DataLoader(data, batch_size=2, num_workers=1)


def say_error(error, is_untouched):
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
        untouched=is_untouched,
    )


def train(mesh):
    everything = PLAN["mode"] == "threads"
    own = range(num_stages()) if everything else [own_stage()]
    stages = {s: Stage(s) for s in own}
    optimizer = torch.optim.SGD([s.weight for s in stages.values()], lr=0.1)
    loader = None
    while HERE.step < PLAN["steps"]:
        strike_outside("between")
        fork_between()
        if PLAN["fault"] == "loader" and HERE.step == 1:
            loader = make_loader()
        say("step")
        before = [stage.weight.detach().clone() for stage in stages.values()]
        try:
            train_step(list(stages.values()) if everything else stages, loader, mesh)
        except Exception as error:
            after = [stage.weight.detach() for stage in stages.values()]
            say_error(error, all(map(torch.equal, before, after)))
            error.__traceback__ = None  # its frames keep the session
            gc.collect()
            say("left over", **left_over())
            if not PLAN["again"]:
                raise
            PLAN["again"] = False
            PLAN["fault"] = "none"
        optimizer.step()
        optimizer.zero_grad()
        HERE.step += 1
    say("done")


def striking_in_set_up():
    """The fault strikes when this rank has said where it is and heard where the others are."""
    from rrfp.rendezvous import Rendezvous

    exchange = Rendezvous.exchange

    def exchange_and_strike(self, card):
        cards = exchange(self, card)
        strike_outside("setup")
        return cards

    return mock.patch.object(Rendezvous, "exchange", exchange_and_strike)


def main():
    torch.set_num_threads(1)
    import rrfp  # noqa: F401 -- now: on a busy machine it takes a part of the 2 s of a step

    mesh = None
    if PLAN["mode"] == "processes":
        dist.init_process_group("gloo")
        dist.barrier()  # the faults begin when the process group is whole
    if PLAN["group"]:
        shape = (num_stages(), 2)
        mesh = dist.device_mesh.init_device_mesh("cpu", shape, mesh_dim_names=("pp", "tp"))
    HERE.own_sockets = connected_sockets()
    say("ready")
    with contextlib.ExitStack() as stack:
        if PLAN["fault"] == "drop":
            import parity_late  # imports rrfp, which the forking process must not have

            stack.enter_context(parity_late.late_runtimes(0, 0.0, is_dropped))
        if PLAN["fault"].endswith("-setup"):
            stack.enter_context(striking_in_set_up())
        train(mesh)
    if PLAN["mode"] == "processes" and not PLAN["fault"].startswith("leave"):
        leave_together()


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
    is paid once, and to import what an optimizer does, which is as much again. The ranks are whole
    processes otherwise: own session, own interpreter exit. What is there before the fork is not
    looked through by their collections of garbage, which would copy its pages."""
    torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    gc.collect()
    gc.freeze()
    signal.signal(signal.SIGCHLD, reap)
    for line in sys.stdin:
        request = json.loads(line)
        pid = os.fork()
        if pid:
            tell_parent(started=pid)
            continue
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background ignores it
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
    HERE.rank = int(os.environ["RANK"])
    if PLAN["mode"] == "restart":
        import restart_rank

        restart_rank.main()
    else:
        try:
            main()
        except KeyboardInterrupt:
            # The exit status does not tell: Python forgets the signal when anything evaluates a
            # string on the way out, which torch does in some builds.
            say("interrupted")
            raise
