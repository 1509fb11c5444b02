"""``python -m rrfp info | demo``: what this installation is, and a look at a step."""

import argparse
import os
import platform
import sys
import time

import torch
from torch import nn

import rrfp
from rrfp import _C
from rrfp.settings import SETTINGS


def info():
    """Print the build, the versions, the settings and the address for other hosts."""
    for name, value in rrfp.build_info().items():
        print(f"{name}: {value}")
    print(f"python: {platform.python_version()}, {platform.platform()}")
    for name, value in vars(SETTINGS).items():
        print(f"setting {name}: {value}")
    try:
        master = os.environ.get("MASTER_ADDR", "")
        print(f"address for other hosts: {_C.choose_host(master, SETTINGS.socket_interfaces)}")
    except ValueError as error:
        print(f"address for other hosts: none, because {error}")


class _Sleeper(nn.Module):
    """A stage whose forward takes as long as its microbatch says, without using the CPU."""

    def __init__(self, index):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.index = index

    def forward(self, x):
        time.sleep(0.004 * (1 + (int(x.shape[0]) * (self.index + 3)) % 4))
        return torch.tanh(self.linear(x))


def demo():
    """Run a step of four sleeping stages in a fixed order, and by readiness with as many
    microbatches in flight on each rank and with more; print the reports.
    """
    torch.manual_seed(0)
    stages = [_Sleeper(index) for index in range(4)]
    batch = [torch.randn(1 + m % 5, 4) for m in range(12)]
    for title, options in (
        ("fixed 1F1B order, which has 4, 3, 2 and 1 in flight", {"hint": "1f1b", "slack": 0}),
        ("by readiness, the same limits", {"max_in_flight": "1f1b"}),
        ("by readiness, limit 8 on each rank", {"max_in_flight": 8}),
    ):
        result = rrfp.run_pipeline(stages, batch, targets=batch, loss_fn=nn.functional.mse_loss,
                                   **options)
        print(f"{title}: loss {sum(map(float, result.losses)) / len(batch):.4f}\n{result.report}\n")


def main(arguments=None):
    parser = argparse.ArgumentParser(prog="python -m rrfp")
    parser.add_argument("command", choices=("info", "demo"))
    command = parser.parse_args(arguments).command
    {"info": info, "demo": demo}[command]()


if __name__ == "__main__":
    sys.exit(main())
