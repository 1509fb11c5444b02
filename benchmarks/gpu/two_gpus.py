"""How the benchmarks that run as one process on each of two GPUs, under torchrun, begin and end."""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import record  # noqa: E402


def join(backend="nccl"):
    """(rank, its device), with torch.distributed initialised."""
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group(backend, device_id=device)
    return int(os.environ["RANK"]), device


def keep(out, results):
    """Write a result file of that name from rank 0; without a name, none."""
    if out and dist.get_rank() == 0:
        record.write(out, {"device": f"2x {torch.cuda.get_device_name()}", **results})


def leave():
    dist.barrier()
    dist.destroy_process_group()
