"""Where a figure comes from: machine, commit and command beside every result file."""

import json
import os
import platform
import subprocess
import sys
from datetime import datetime, timezone
from pathlib import Path

RESULTS = Path(__file__).with_name("results")


def git(*arguments):
    process = subprocess.run(
        ["git", *arguments], cwd=RESULTS.parent, capture_output=True, text=True, check=False
    )
    return process.stdout.strip()


def processor():
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def _from_root(script):
    """A program's path as it is typed at the root of the repository."""
    path, root = Path(script).resolve(), RESULTS.parents[1]
    return str(path.relative_to(root) if path.is_relative_to(root) else path.name)


def provenance():
    import torch

    return {
        "machine": {
            "processor": processor(),
            "cores": os.cpu_count(),
            "load_average": os.getloadavg(),
            "system": platform.platform(),
            "python": platform.python_version(),
            "torch": torch.__version__,
        },
        "commit": git("rev-parse", "HEAD") or "unknown",
        "uncommitted_changes": bool(git("status", "--porcelain")),
        "real_time_priority": os.sched_getscheduler(0) in (os.SCHED_FIFO, os.SCHED_RR),
        "command": " ".join(["python", _from_root(sys.argv[0]), *sys.argv[1:]]),
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def write(name, results):
    """Writes results/<name>.json and says where."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps({**provenance(), "results": results}, indent=2) + "\n")
    print(f"written: {path}")


def quantiles(values):
    """Median and quartiles: (p25, p50, p75)."""
    ranked = sorted(values)
    return tuple(ranked[round(q * (len(ranked) - 1))] for q in (0.25, 0.5, 0.75))
