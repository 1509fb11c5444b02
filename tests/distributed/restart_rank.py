"""A rank that trains with checkpoints: dropout, Adam, deterministic steps; for test_restart.py.

Goes on from the newest checkpoint of its folder that every rank has written, if there is one.
"""

import os
from pathlib import Path

import torch
import torch.distributed as dist
from rank_faults import HERE, PLAN, leave_together, say, strike
from torch import nn

M = 4
WIDTH = 8


class Stage(nn.Module):
    def __init__(self, index):
        super().__init__()
        generator = torch.Generator().manual_seed(index)
        self.index = index
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, generator=generator))
        self.dropout = nn.Dropout(0.3)

    def forward(self, hidden, microbatch):
        strike("F", self.index, microbatch)
        hidden = self.dropout(torch.tanh(hidden @ self.weight))
        if hidden.requires_grad:
            hidden.register_hook(lambda _: strike("B", self.index, microbatch))
        return hidden, microbatch


def loss_fn(output, target):
    return (output[0] - target).square().mean()


class Training:
    """What a checkpoint holds: module, optimizer, the pipeline's count of steps."""

    def __init__(self):
        self.stage = Stage(HERE.rank)
        self.optimizer = torch.optim.Adam(self.stage.parameters(), lr=0.01)
        self.pipeline_state = {"step": 0}
        self.folder = Path(PLAN["folder"])

    def path(self, rank, step):
        return self.folder / f"{step}.{rank}"

    def load(self):
        steps = [
            step for step in range(PLAN["steps"] + 1)
            if all(self.path(rank, step).exists() for rank in range(PLAN["num_ranks"]))
        ]
        if not steps:
            return
        state = torch.load(self.path(HERE.rank, steps[-1]), weights_only=True)
        self.stage.load_state_dict(state["stage"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.pipeline_state = state["pipeline"]
        HERE.step = steps[-1]

    def save(self, step):
        state = {"stage": self.stage.state_dict(), "optimizer": self.optimizer.state_dict(),
                 "pipeline": self.pipeline_state}
        part = self.path(HERE.rank, "part")
        torch.save(state, part)
        os.rename(part, self.path(HERE.rank, step))

    def run_step(self, pipeline):
        generator = torch.Generator().manual_seed(HERE.step)
        inputs = [(torch.randn(2 + m, WIDTH, generator=generator), m) for m in range(M)]
        targets = [torch.randn(2 + m, WIDTH, generator=generator) for m in range(M)]
        last = PLAN["num_ranks"] - 1
        result = pipeline.step(
            inputs if HERE.rank == 0 else None, targets if HERE.rank == last else None, loss_fn,
            deterministic=True, seed=11, stall_timeout_s=30, broadcast_loss=True,
        )
        return [loss.item().hex() for loss in result.losses]

    def train(self):
        """Steps with one pipeline, to the end or an error."""
        import rrfp

        with rrfp.Pipeline({HERE.rank: self.stage}) as pipeline:
            pipeline.load_state_dict(self.pipeline_state)
            while HERE.step < PLAN["steps"]:
                self.optimizer.zero_grad()
                losses = self.run_step(pipeline)
                self.optimizer.step()
                self.pipeline_state = pipeline.state_dict()
                HERE.step += 1
                say("trained", losses=losses)
                self.save(HERE.step)


def main():
    import rrfp

    torch.set_num_threads(1)
    torch.manual_seed(HERE.rank)  # must not matter
    dist.init_process_group("gloo")
    training = Training()
    training.load()
    try:
        training.train()
    except rrfp.RrfpError as error:
        say("error", type=type(error).__name__, text=str(error))
        if not PLAN["again"]:
            raise
        PLAN["fault"] = "none"
        training.train()
    say("done")
    leave_together()
