"""What leaving SMs free (RRFP_FREE_SMS) costs matrix products, and what NCCL's kernels gain.

    python benchmarks/gpu/free_sms.py [--free 8 16 32] [--out gpu_free_sms]

On one GPU. One stream has bf16 products enqueued all the time. On another, NCCL carries a message
from the GPU to itself, which its kernel does as it does for a neighbour, without the link: `message
us` is from the moment at which the stream could begin to the message's end, waiting for SMs
included, idle and beside the products. The counts of free SMs alternate, medians of all rounds.
"""

import argparse
import contextlib
import ctypes
import json
import statistics
import sys
from pathlib import Path

import torch

from rrfp.free_multiprocessors import left_free

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import record  # noqa: E402

SHAPES = {"8192x2048x2048": (8192, 2048, 2048), "8192x8192x4096": (8192, 8192, 4096)}
SIZES = {"4 B": 4, "16 MiB": 16 << 20}
ROUNDS, BATCHES, BATCH_MS, MESSAGES = 5, 6, 10, 20
NCCL_INT8 = 0


class UniqueId(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_char * 128)]


class Loopback:
    """A communicator of one rank, which sends to itself."""

    def __init__(self):
        with open("/proc/self/maps") as maps:
            path = next(line.split()[-1] for line in maps if "libnccl.so" in line)
        self._nccl = ctypes.CDLL(path)
        self._comm = ctypes.c_void_p()
        unique = UniqueId()
        self._call("ncclGetUniqueId", ctypes.byref(unique))
        self._call("ncclCommInitRank", ctypes.byref(self._comm), 1, unique, 0)

    def _call(self, name, *arguments):
        status = getattr(self._nccl, name)(*arguments)
        if status != 0:
            raise RuntimeError(f"{name} answered {status}")

    def send(self, source, target, stream):
        """Enqueue one message: the bytes of ``source`` into ``target``."""
        rest = (ctypes.c_size_t(source.numel()), NCCL_INT8, 0, self._comm,
                ctypes.c_void_p(stream.cuda_stream))
        self._call("ncclGroupStart")
        self._call("ncclSend", ctypes.c_void_p(source.data_ptr()), *rest)
        self._call("ncclRecv", ctypes.c_void_p(target.data_ptr()), *rest)
        self._call("ncclGroupEnd")


def timed_events():
    return tuple(torch.cuda.Event(enable_timing=True) for _ in range(2))


class Products:
    """Products of one shape on the current stream, ``BATCH_MS`` at a time."""

    def __init__(self, shape, device):
        m, k, n = shape
        self._a = torch.randn(m, k, device=device, dtype=torch.bfloat16)
        self._b = torch.randn(k, n, device=device, dtype=torch.bfloat16)
        self._out = torch.empty(m, n, device=device, dtype=torch.bfloat16)
        self.batch = 10
        self.enqueue()
        self.batch = max(1, round(BATCH_MS / self.ms()))

    def enqueue(self):
        for _ in range(self.batch):
            torch.mm(self._a, self._b, out=self._out)

    def ms(self):
        """What one takes, alone."""
        begin, end = timed_events()
        begin.record()
        self.enqueue()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / self.batch


class Messages:
    """The messages of one size on a stream of their own."""

    def __init__(self, loopback, size, device):
        self._loopback, self._stream = loopback, torch.cuda.Stream(device, priority=-1)
        self._source = torch.ones(size, device=device, dtype=torch.int8)
        self._target = torch.zeros_like(self._source)

    def us(self, products):
        """Of each message, one after the other, beside the products where there are any."""
        found = []
        while len(found) < MESSAGES:
            busy = torch.cuda.Event()
            if products is not None:
                products.enqueue()
                busy.record()
            for _ in range(4):
                if products is not None and busy.query():
                    break  # the next would be alone
                begin, end = timed_events()
                begin.record(self._stream)
                self._loopback.send(self._source, self._target, self._stream)
                end.record(self._stream)
                end.synchronize()
                found.append(1e3 * begin.elapsed_time(end))
            torch.cuda.synchronize()
        if not bool((self._target == 1).all()):
            raise RuntimeError("a message did not arrive")
        self._target.zero_()
        return found


def measure(shape, counts, loopback, device):
    """One row per count of free SMs."""
    products = Products(SHAPES[shape], device)
    messages = {name: Messages(loopback, size, device) for name, size in SIZES.items()}
    alone = {count: [] for count in counts}
    beside = {(count, name): [] for count in counts for name in SIZES}
    idle = {name: statistics.median(messages[name].us(None)) for name in SIZES}
    for _ in range(ROUNDS):
        for count in counts:
            with left_free(count) if count else contextlib.nullcontext():
                products.ms()  # the first product may choose another kernel
                alone[count] += [products.ms() for _ in range(BATCHES)]
                for name in SIZES:
                    beside[count, name] += messages[name].us(products)
    at_none = statistics.median(alone[counts[0]])
    return [{
        "product": shape, "free_sms": count,
        "product_us": round(1e3 * statistics.median(alone[count]), 1),
        "price": round(statistics.median(alone[count]) / at_none - 1, 4),
        **{f"message_us_{when}": {name: round(us, 1) for name, us in found.items()}
           for when, found in (("idle", idle), ("beside", {
               name: statistics.median(beside[count, name]) for name in SIZES}))},
    } for count in counts]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--free", nargs="+", type=int, default=[8, 16, 32])
    parser.add_argument("--out")
    arguments = parser.parse_args()
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    loopback = Loopback()
    rows = []
    for shape in SHAPES:
        for row in measure(shape, [0, *arguments.free], loopback, device):
            rows.append(row)
            print(json.dumps(row), flush=True)
    if arguments.out:
        record.write(arguments.out, {"device": torch.cuda.get_device_name(), "rows": rows})


if __name__ == "__main__":
    main()
