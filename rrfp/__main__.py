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

# What an empty or missing value of a build or a setting stands for.
_UNSET = {
    "sanitizer": "none",
    "nvtx": "none; no ranges for profilers",
    "spin_us": "by the number of cores",
    "socket_interfaces": "whichever reaches the master",
}


def _in_words(name, value):
    if isinstance(value, bool):
        return "on" if value else "off"
    return _UNSET.get(name, "none") if value in ("", None) else value


def _build_rows():
    """What was built; the three facts on CUDA as one."""
    build = rrfp.build_info()
    version, refusal = build.pop("cuda_version"), build.pop("cuda_refusal")
    is_torch_without = torch.version.cuda is None
    if build["cuda"]:
        unused = ", which this torch lacks" if is_torch_without else ""
        build["cuda"] = f"{version // 1000}.{version % 1000 // 10}{unused}"
    else:
        build["cuda"] = ("none; rrfp and this torch are both for CPUs" if is_torch_without
                         else f"none: when rrfp was built, {refusal}")
    return build


def info():
    """Print the build, the versions, the settings and the address for other hosts."""
    for name, value in _build_rows().items():
        print(f"{name}: {_in_words(name, value)}")
    print(f"python: {platform.python_version()}, {platform.platform()}")
    for name, value in vars(SETTINGS).items():
        print(f"setting {name}: {_in_words(name, value)}")
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


_RUNS = (
    ("fixed 1F1B order, which has 4, 3, 2 and 1 in flight", {"hint": "1f1b", "slack": 0}),
    ("by readiness, the same limits", {"max_in_flight": "1f1b"}),
    ("by readiness, limit 8 on each rank", {"max_in_flight": 8}),
)
_ROUNDS = 3
_BELOW_1 = ("Below 1 is slower: noise, or a busy machine. There is nothing to gain where tasks do "
            "not vary, or cores are fewer than ranks.")


def demo():
    """Run steps of four sleeping stages in a fixed order, and by readiness with as many
    microbatches in flight on each rank and with more, in turn; print the reports of the median
    steps, and their times at the end.
    """
    torch.manual_seed(0)
    stages = [_Sleeper(index) for index in range(4)]
    batch = [torch.randn(1 + m % 5, 4) for m in range(12)]
    print(f"The median of {_ROUNDS} steps each of {len(stages)} stages, each a thread of this "
          "process. Their forwards sleep, for 4 to 16 ms,\nwhich differs by stage and microbatch; "
          "nothing here is the time of a real model. Columns: help(rrfp.RankReport).\n")
    # One step first that is not shown: whatever begins with a process is in nobody's time.
    _step(stages, batch, _RUNS[0][1])
    results = {title: [] for title, _ in _RUNS}
    for _ in range(_ROUNDS):
        for title, options in _RUNS:
            results[title].append(_step(stages, batch, options))
    times, busiest_s = {}, []
    for title, of_title in results.items():
        result = sorted(of_title, key=_wall_s)[_ROUNDS // 2]
        print(f"{title}: loss {sum(map(float, result.losses)) / len(batch):.4f}\n{result.report}\n")
        times[title] = _wall_s(result)
        busiest_s.append(max(rank.compute_s for rank in result.report.ranks))
    fixed = times[_RUNS[0][0]]
    times["what the busiest rank computes: no order takes less"] = min(busiest_s)
    print("The step took, and how many times as fast as in the fixed order that is:")
    for title, wall_s in times.items():
        print(f"{1000 * wall_s:7.1f} ms {fixed / wall_s:6.2f}  {title}")
    print(_BELOW_1)


def _wall_s(result):
    return max(rank.wall_s for rank in result.report.ranks)


def _step(stages, batch, options):
    return rrfp.run_pipeline(stages, batch, targets=batch, loss_fn=nn.functional.mse_loss,
                             **options)


def main(arguments=None):
    parser = argparse.ArgumentParser(prog="python -m rrfp")
    parser.add_argument("command", choices=("info", "demo"))
    command = parser.parse_args(arguments).command
    {"info": info, "demo": demo}[command]()


if __name__ == "__main__":
    sys.exit(main())
