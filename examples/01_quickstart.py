import torch
from torch import nn

import rrfp

torch.manual_seed(0)
stages = [  # three stages of one model; here each is run by a thread of its own
    nn.Sequential(nn.Linear(32, 64), nn.ReLU()),
    nn.Sequential(nn.Linear(64, 64), nn.ReLU()),
    nn.Linear(64, 8),
]
optimizer = torch.optim.Adam([p for stage in stages for p in stage.parameters()], lr=1e-2)

for step in range(40):
    inputs = torch.randn(256, 32)  # never seen before; which of the first 8 is the largest?
    targets = inputs[:, :8].argmax(dim=1)
    optimizer.zero_grad()
    result = rrfp.run_pipeline(stages, inputs.chunk(8), targets.chunk(8),
                               nn.functional.cross_entropy, return_outputs=True)
    optimizer.step()
    right = (torch.cat(result.outputs).argmax(dim=1) == targets).float().mean()
    print(f"step {step}: loss {sum(result.losses) / len(result.losses):.3f}, {right:.0%} right")
