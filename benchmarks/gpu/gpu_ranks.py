"""How the benchmarks that run as one process on each GPU, under torchrun, begin and end; and what
the GPUs themselves did meanwhile.

A GPU at its power limit lowers its clock: the busier a schedule keeps it, the longer the same
kernels take. So beside a step's time stand the time of its kernels and the clock.
"""

import atexit
import os
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

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
        name = f"{dist.get_world_size()}x {torch.cuda.get_device_name()}"
        record.write(out, {"device": name, **results})


def kernel_s(work):
    """Seconds in which at least one kernel of ``work`` ran on this rank's GPU."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        work()
        torch.cuda.synchronize()
    spans = sorted(
        (event.time_range.start, event.time_range.end) for event in profiled.events()
        if event.device_type == DeviceType.CUDA and is_kernel(event.name)
    )
    busy_us = end = 0
    for start, stop in spans:
        busy_us += max(0, stop - max(start, end))
        end = max(end, stop)
    return busy_us / 1e6


def is_kernel(name):
    """Not a copy, nor torch.cuda._sleep()."""
    return not name.startswith(("Memcpy", "Memset")) and "spin_kernel" not in name


class Clocks:
    """The clock of this rank's GPU, from nvidia-smi, in the background."""

    QUERY = ["nvidia-smi", "--query-gpu=clocks.sm,power.draw,clocks_event_reasons.sw_power_cap",
             "--format=csv,noheader,nounits", "--loop-ms=50"]

    def __init__(self, device):
        uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
        self._samples = []  # (when, MHz, W, whether its power limit holds it back)
        self._asking = subprocess.Popen([*self.QUERY, f"--id={uuid}"], text=True,
                                        stdout=subprocess.PIPE)
        atexit.register(self._asking.kill)
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self):
        for line in self._asking.stdout:
            mhz, watts, capped = line.split(",")
            self._samples.append(
                (time.monotonic(), float(mhz), float(watts), capped.strip() == "Active"))

    def since(self, began):
        """Medians since time.monotonic() was ``began``; {} where there was no sample."""
        samples = [sample for sample in self._samples if sample[0] >= began]
        if not samples:
            return {}
        _, mhz, watts, capped = zip(*samples, strict=True)
        return {"sm_mhz": statistics.median(mhz), "watts": round(statistics.median(watts)),
                "at_power_limit": round(statistics.mean(capped), 2)}


def leave():
    dist.barrier()
    dist.destroy_process_group()
