"""Checkpoints with torch.distributed.checkpoint: saved by one set of processes, loaded by another.

    python examples/checkpoint.py DIRECTORY                               one process
    torchrun --nproc-per-node 2 examples/checkpoint.py DIRECTORY          one process a rank

Trains to step 6 and saves after step 3. Started again with the same directory it goes on from
there, also with another number of processes, and prints the same losses to the last bit: modules,
optimizers, schedules, and the count of steps that random numbers depend on are all in the
checkpoint.
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import rrfp

STEPS, SAVED_AFTER, NUM_STAGES, WIDTH = 6, 3, 2, 16


def make_stage(index):
    torch.manual_seed(index)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(0.1))


class Training:
    """The stages of this process, each with an optimizer and a schedule of its own."""

    def __init__(self, owned):
        self.stages = {index: make_stage(index) for index in owned}
        self.optimizers = {index: torch.optim.AdamW(stage.parameters(), lr=1e-2)
                           for index, stage in self.stages.items()}
        self.schedules = {index: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
                          for index, optimizer in self.optimizers.items()}
        is_alone = len(owned) == NUM_STAGES
        self.pipeline = rrfp.Pipeline(list(self.stages.values()) if is_alone else self.stages)
        self.steps_done = 0

    def state(self):
        """Names are unique over all processes: each stage has a name of its own."""
        state = {"pipeline": self.pipeline.state_dict(), "steps_done": self.steps_done}
        for index, stage in self.stages.items():
            model, optimizer = get_state_dict(stage, self.optimizers[index])
            state[f"stage{index}"] = {"model": model, "optimizer": optimizer,
                                      "schedule": self.schedules[index].state_dict()}
        return state

    def load(self, directory):
        state = self.state()
        dcp.load(state, checkpoint_id=directory)
        for index, stage in self.stages.items():
            of_stage = state[f"stage{index}"]
            set_state_dict(stage, self.optimizers[index], model_state_dict=of_stage["model"],
                           optim_state_dict=of_stage["optimizer"])
            self.schedules[index].load_state_dict(of_stage["schedule"])
        self.pipeline.load_state_dict(state["pipeline"])
        self.steps_done = state["steps_done"]

    def step(self):
        """One training step; the losses, on every rank."""
        draw = torch.Generator().manual_seed(self.steps_done)
        batch = torch.randn(8, WIDTH, generator=draw).chunk(4)
        for optimizer in self.optimizers.values():
            optimizer.zero_grad()
        result = self.pipeline.step(
            batch if 0 in self.stages else None,
            batch if NUM_STAGES - 1 in self.stages else None,
            nn.functional.mse_loss, deterministic=True, seed=1, broadcast_loss=True,
        )
        for index in self.stages:
            self.optimizers[index].step()
            self.schedules[index].step()
        self.steps_done += 1
        return result.losses


def main():
    directory = Path(sys.argv[1])
    torch.set_num_threads(1)
    owned = range(NUM_STAGES)
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
        owned = [dist.get_rank()]
    training = Training(owned)
    if (directory / ".metadata").exists():
        training.load(directory)
    while training.steps_done < STEPS:
        losses = training.step()
        if 0 in training.stages:
            print(f"step {training.steps_done}: loss {sum(losses).item().hex()}")
        if training.steps_done == SAVED_AFTER:
            dcp.save(training.state(), checkpoint_id=directory)
    training.pipeline.close()
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
