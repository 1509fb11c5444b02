"""What a steady stream of messages costs the matrix products beside it, and how fast it is.

    torchrun --nproc-per-node 2 benchmarks/gpu/gemm_slowdown.py [--transports ipc nccl]
        [--free 0 16 32] [--out gpu_gemm_slowdown]

Both ranks time batches of bf16 matrix products on their own stream while a second thread sends
16 MiB messages from rank 0 to rank 1, as a pipeline of two stages that compute nothing. Phases with
and without messages alternate; a slow-down is that of medians, and rank 0 sends, rank 1 receives.
With the nccl channel also where the products leave SMs free (RRFP_FREE_SMS): what they take alone
then is its price.
"""

import argparse
import collections
import contextlib
import json
import statistics
import threading
import time

import gpu_ranks
import torch
import torch.distributed as dist
from torch import nn

import rrfp
from rrfp.free_multiprocessors import left_free

SHAPES = {"8192x2048x2048": (8192, 2048, 2048, 40), "8192x8192x4096": (8192, 8192, 4096, 6)}
MESSAGE_BYTES = 16 << 20
NUM_MESSAGES = 2048  # they outlast some batches of products
PHASES, QUIET_BATCHES = 12, 30
# Batches launched before the one that is waited for: the host's thread may lose Python's lock to
# that of the messages for 5 ms, and the GPU is to have work meanwhile.
AHEAD = 4


class Pass(nn.Module):
    """A stage that computes nothing; its parameter says which GPU it is on."""

    def __init__(self, device):
        super().__init__()
        self.place = nn.Parameter(torch.zeros((), device=device))

    def forward(self, x):
        return x


class Stream:
    """The messages: one step of a pipeline, in a thread of its own."""

    def __init__(self, rank, device, transport):
        message = torch.ones(MESSAGE_BYTES // 2, device=device, dtype=torch.bfloat16)
        self.messages = [message.clone() for _ in range(8)] * (NUM_MESSAGES // 8)
        self.rank, self.transport, self.device = rank, transport, device
        self.stream = torch.cuda.Stream(device)
        self.pipeline = None

    def step(self):
        torch.cuda.set_device(self.device)
        with torch.cuda.stream(self.stream):
            if self.pipeline is None:
                self.pipeline = rrfp.Pipeline(
                    {self.rank: Pass(self.device)}, transport=self.transport
                )
            self.pipeline.step(
                self.messages if self.rank == 0 else None, forward_only=True, max_in_flight=8
            )
            self.stream.synchronize()


def launched(work, count):
    """The events around a batch."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(count):
        work()
    end.record()
    return begin, end


def batches_ms(work, count, goes_on):
    """ms of a product by batch, of those that end while it goes on."""
    ahead = collections.deque(launched(work, count) for _ in range(AHEAD))
    times = []
    while goes_on():
        ahead.append(launched(work, count))
        begin, end = ahead.popleft()
        end.synchronize()
        if goes_on():
            times.append(begin.elapsed_time(end) / count)
    torch.cuda.current_stream().synchronize()
    return times


def phase(work, count, messages):
    """(ms of a product by batch, seconds of the messages)."""
    dist.barrier()
    if messages is None:
        quiet = iter(range(2 * QUIET_BATCHES))
        return batches_ms(work, count, lambda: next(quiet, None) is not None), None
    seconds = []

    def send():
        start = time.perf_counter()
        messages.step()
        seconds.append(time.perf_counter() - start)

    thread = threading.Thread(target=send)
    thread.start()
    times = batches_ms(work, count, thread.is_alive)
    thread.join()
    return times, seconds[0]


def measure(shape, transport, num_free, rank, device):
    m, k, n, count = SHAPES[shape]
    a, b = (torch.randn(*size, device=device, dtype=torch.bfloat16) for size in ((m, k), (k, n)))
    out = torch.empty(m, n, device=device, dtype=torch.bfloat16)
    messages = Stream(rank, device, transport)

    def work():
        torch.mm(a, b, out=out)

    quiet, busy, seconds = [], [], []
    for number in range(PHASES):
        alone, _ = phase(work, count, None)
        beside, took = phase(work, count, messages)
        if number:  # the first sets up
            quiet += alone
            busy += beside
            seconds.append(took)
    messages.pipeline.close()
    own = {"alone_ms": statistics.median(quiet), "beside_ms": statistics.median(busy),
           "batches": len(busy), "gb_per_s": NUM_MESSAGES * MESSAGE_BYTES / 1e9
           / statistics.median(seconds)}
    both = [None, None]
    dist.all_gather_object(both, own)
    return {
        "product": shape, "channel": transport, "free_sms": num_free,
        **{f"{who}_slow_down": round(row["beside_ms"] / row["alone_ms"] - 1, 4)
           for who, row in zip(("sender", "receiver"), both, strict=True)},
        "sender_alone_ms": round(both[0]["alone_ms"], 4),
        "gb_per_s": round(both[1]["gb_per_s"], 1), "batches": [row["batches"] for row in both],
    }


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--transports", nargs="+", default=["ipc", "nccl"])
    parser.add_argument("--free", nargs="+", type=int, default=[0, 16, 32])
    parser.add_argument("--out")
    arguments = parser.parse_args()
    rank, device = gpu_ranks.join("cpu:gloo,cuda:nccl")
    rows = []
    for transport in arguments.transports:
        for num_free in arguments.free if transport == "nccl" else [0]:
            for shape in SHAPES:
                with left_free(num_free) if num_free else contextlib.nullcontext():
                    rows.append(measure(shape, transport, num_free, rank, device))
                if rank == 0:
                    print(json.dumps(rows[-1]), flush=True)
    gpu_ranks.keep(arguments.out, {"rows": rows})
    gpu_ranks.leave()


if __name__ == "__main__":
    main()
