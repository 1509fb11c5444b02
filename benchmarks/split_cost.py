"""What a split backward costs: I and W of a transformer block, against its full backward.

B and the halves alternate in every round; figures are medians and quartiles over rounds, per
microbatch of the few in flight, so that a GPU is not waited for after each. Also says whether the
bits are the same, and whether B itself repeats its bits.

    python benchmarks/split_cost.py [--device cuda] [--rounds 15] [--out split_cost]
"""

import argparse
import time

import record
import torch
from torch import nn

from rrfp.split_backward import run_input_half

SIZES = {  # (width, tokens) of a microbatch: as far as the device makes sense of
    "cpu": [(256, 256), (512, 512), (1024, 512)],
    "cuda": [(1024, 4096), (2048, 4096), (4096, 4096)],
}
HEADS = 8
IN_FLIGHT = 4


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        batch, length, width = x.shape
        qkv = self.qkv(self.first(x)).view(batch, length, 3, HEADS, width // HEADS)
        q, k, v = (part.transpose(1, 2) for part in qkv.unbind(2))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(nn.functional.gelu(self.up(self.second(x))))


class Clock:
    def __init__(self, device):
        self.is_cuda = device == "cuda"

    def now(self):
        if self.is_cuda:
            torch.cuda.synchronize()
        return time.perf_counter()


class Enter(torch.autograd.Function):
    """The received input, as a pipeline enters it into the graph."""

    gradients = []

    @staticmethod
    def forward(ctx, anchor, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        Enter.gradients.append(gradient)
        return None, None


def forwards(block, batches):
    """[(anchor, output)] with no gradients in the parameters but zeros, as from step 2 on."""
    for parameter in block.parameters():
        parameter.grad = torch.zeros_like(parameter)
    Enter.gradients.clear()
    anchors = [torch.zeros((), requires_grad=True) for _ in batches]
    return [(a, block(Enter.apply(a, x))) for a, x in zip(anchors, batches, strict=True)]


def gradients(block):
    return [*Enter.gradients, *(parameter.grad for parameter in block.parameters())]


def full(block, batches, seed, clock):
    """Seconds of a backward, gradients."""
    runs = forwards(block, batches)
    start = clock.now()
    for _, output in runs:
        torch.autograd.backward([output], [seed])
    return (clock.now() - start) / len(runs), gradients(block)


def halves(block, batches, seed, clock):
    """Seconds of an I, of a W, gradients."""
    runs = forwards(block, batches)
    start = clock.now()
    pending = [run_input_half([output], [seed], anchor) for anchor, output in runs]
    middle = clock.now()
    for half in pending:
        half.run()
    end = clock.now()
    return (middle - start) / len(runs), (end - middle) / len(runs), gradients(block)


def same(some, others):
    return all(torch.equal(a, b) for a, b in zip(some, others, strict=True))


def measure(width, tokens, device, dtype, rounds):
    torch.manual_seed(0)
    block = Block(width).to(device, dtype)
    shape = (tokens // 256, 256, width)
    batches = [torch.randn(shape, device=device, dtype=dtype) for _ in range(IN_FLIGHT)]
    seed = torch.randn(shape, device=device, dtype=dtype)
    clock = Clock(device)
    times = {"B": [], "I": [], "W": [], "I + W over B": []}
    repeats, splits = [], []
    for index in range(-3, rounds):
        full_s, expected = full(block, batches, seed, clock)
        input_s, weight_s, got = halves(block, batches, seed, clock)
        splits.append(same(got, expected))
        repeats.append(same(full(block, batches, seed, clock)[1], expected))
        if index >= 0:
            parts = (full_s, input_s, weight_s, (input_s + weight_s) / full_s)
            for values, value in zip(times.values(), parts, strict=True):
                values.append(value)
    row = {name: record.quantiles(values) for name, values in times.items()}
    bits = {"split has the bits of B": all(splits), "B has its own bits again": all(repeats)}
    return {"width": width, "tokens": tokens, "dtype": str(dtype), **bits, **row}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=list(SIZES), default="cpu")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", default="split_cost", help="name of the result file, or empty")
    arguments = parser.parse_args()
    dtypes = [torch.float32] if arguments.device == "cpu" else [torch.bfloat16, torch.float32]
    rows = []
    for dtype in dtypes:
        for width, tokens in SIZES[arguments.device]:
            row = measure(width, tokens, arguments.device, dtype, arguments.rounds)
            rows.append(row)
            parts = "  ".join(f"{name} {1000 * row[name][1]:.2f} ms" for name in "BIW")
            print(f"{row['dtype']} width {width}: {parts}  "
                  f"I + W over B {row['I + W over B'][1]:.3f}  "
                  f"same bits {row['split has the bits of B']}, of B itself "
                  f"{row['B has its own bits again']}")
    if arguments.out:
        device = torch.cuda.get_device_name() if arguments.device == "cuda" else "cpu"
        record.write(arguments.out, {"device": device, "rows": rows})


if __name__ == "__main__":
    main()
