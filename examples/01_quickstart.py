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
inputs = torch.randn(64, 32)
targets = inputs[:, :8].argmax(dim=1)

for step in range(30):
    optimizer.zero_grad()
    result = rrfp.run_pipeline(stages, inputs.chunk(8), targets=targets.chunk(8),
                               loss_fn=nn.functional.cross_entropy)
    optimizer.step()
    print(f"step {step}: loss {sum(result.losses).item() / 8:.3f}")
