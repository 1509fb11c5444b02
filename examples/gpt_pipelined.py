"""A small GPT learns the bytes of Python's own sources."""

import sysconfig
from pathlib import Path

import torch
from gpt import VOCABULARY, Block, loss_per_token
from torch import nn

import rrfp

STEPS, BATCH, LENGTH, WIDTH, BLOCKS = 200, 16, 32, 32, 6


class Embed(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(LENGTH, WIDTH)

    def forward(self, x):
        return self.tokens(x) + self.positions.weight[: x.shape[1]]


torch.manual_seed(0)
library = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:50]
text = torch.frombuffer(bytearray(b"".join(p.read_bytes() for p in library)), dtype=torch.uint8)
model = nn.Sequential(
    Embed(),
    *[Block(WIDTH, num_heads=4) for _ in range(BLOCKS)],
    nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)),
)
torch.distributed.init_process_group("gloo")
rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
model = model[len(model) * rank // ranks : len(model) * (rank + 1) // ranks]
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-3, total_steps=STEPS)
draw = torch.Generator().manual_seed(1)

for step in range(STEPS):
    starts = torch.randint(len(text) - LENGTH - 1, (BATCH,), generator=draw)
    batch = torch.stack([text[s : s + LENGTH + 1] for s in starts]).long()
    inputs, targets = batch[:, :-1], batch[:, 1:]
    optimizer.zero_grad()
    result = rrfp.run_pipeline(model, inputs.chunk(8) if rank == 0 else None,
                               targets.chunk(8) if rank == ranks - 1 else None, loss_per_token)
    rrfp.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    schedule.step()
    if rank == ranks - 1:
        print(f"step {step}: loss {sum(result.losses).item() / len(result.losses):.5f}")
