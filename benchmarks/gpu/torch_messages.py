"""What a message between two GPUs costs through torch.distributed's send and recv (NCCL).

    torchrun --nproc-per-node 2 benchmarks/gpu/torch_messages.py

The rows of gpu_messages.cc for the same sizes: from the sender's computation being done to the
receiver's CPU knowing that the data is there, as both hosts see it by asking an event again and
again; and the bandwidth of a stream of messages. Idle, and beside matrix products of about 850 us
on both GPUs. Contents are checked. Each rank prints nothing but rank 0's JSON lines.
"""

import json
import statistics
import time

import gpu_ranks
import torch
import torch.distributed as dist

SIZES = (4, 64 << 10, 1 << 20, 16 << 20, 128 << 20)
NUM_MESSAGES = {"idle": 60, "busy": 40}
NUM_IN_STREAM = 40
GEMM_US = 850
NUM_GEMMS = 4  # beside a message


class Products:
    """Matrix products on this rank's GPU, each as long as GEMM_US, give or take."""

    def __init__(self, device):
        self.left = torch.randn(8192, 8192, device=device, dtype=torch.bfloat16)
        self.stream = torch.cuda.Stream(device)
        self.right = torch.randn(8192, self.columns(device), device=device, dtype=torch.bfloat16)
        self.out = self.left @ self.right

    def columns(self, device):
        """How many columns take that long."""
        trial = torch.randn(8192, 2048, device=device, dtype=torch.bfloat16)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for _ in range(3):
            begin.record()
            for _ in range(10):
                self.left @ trial
            end.record()
            end.synchronize()
        return 128 * max(1, round(2048 * GEMM_US * 10 / (1000 * begin.elapsed_time(end)) / 128))

    def launch(self, count):
        for _ in range(count):
            torch.matmul(self.left, self.right, out=self.out)


def one_message(rank, tensor, products, number):
    """When it was computed (rank 0) or known (rank 1), on the host's clock, in ns."""
    computed = torch.cuda.Event()
    dist.barrier()
    torch.cuda.synchronize()
    if products is not None:
        products.launch(1)
    if rank == 0:
        tensor.fill_(number % 100)
        computed.record()
        work = dist.isend(tensor, 1)
        seen = computed.query
    else:
        work = dist.irecv(tensor, 0)
        seen = work.is_completed
    if products is not None:
        products.launch(NUM_GEMMS)
    while not seen():
        pass
    now = time.monotonic_ns()
    work.wait()
    torch.cuda.synchronize()
    assert rank == 0 or bool((tensor == number % 100).all()), "a message arrived with other words"
    return now


def gb_per_s(rank, tensor, products):
    """Of messages one after the other, in GB/s of this rank's own time."""
    dist.barrier()
    torch.cuda.synchronize()
    began = time.monotonic()
    for _ in range(NUM_IN_STREAM):
        if products is not None:
            products.launch(1)
        work = dist.isend(tensor, 1) if rank == 0 else dist.irecv(tensor, 0)
    work.wait()
    torch.cuda.synchronize()
    return NUM_IN_STREAM * tensor.nbytes / (time.monotonic() - began) / 1e9


def measure(rank, device, size, products):
    load = "idle" if products is None else "busy"
    tensor = torch.zeros(size // 2, device=device, dtype=torch.bfloat16)
    mine = [one_message(rank, tensor, products, n) for n in range(3 + NUM_MESSAGES[load])][3:]
    both = [None, None]
    dist.all_gather_object(both, mine)
    delays = sorted((known - computed) / 1000 for computed, known in zip(*both, strict=True))
    return {"channel": "torch send/recv", "load": load, "bytes": size,
            "computed_to_known_us": [round(statistics.median(delays), 1),
                                     round(delays[len(delays) * 95 // 100], 1)],
            "gb_per_s": round(gb_per_s(rank, tensor, products), 1)}


def main():
    rank, device = gpu_ranks.join()
    products = Products(device)
    for load in (None, products):
        for size in SIZES:
            row = measure(rank, device, size, load)
            if rank == 0:
                print(json.dumps(row), flush=True)
    gpu_ranks.leave()


if __name__ == "__main__":
    main()
