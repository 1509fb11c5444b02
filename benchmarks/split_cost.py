"""What a split backward costs: I and W of a transformer block, against its full backward.

The three alternate in every round; figures are medians and quartiles over rounds. On a GPU each
part is timed by events, host and device together. Also says whether the bits are the same.

    python benchmarks/split_cost.py [--device cuda] [--rounds 40] [--out split_cost]
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

    @staticmethod
    def forward(ctx, anchor, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        Enter.gradient = gradient
        return None, None


def measure(width, tokens, device, dtype, rounds):
    torch.manual_seed(0)
    block = Block(width).to(device, dtype)
    x = torch.randn(tokens // 256, 256, width, device=device, dtype=dtype)
    seed = torch.randn_like(x)
    clock = Clock(device)
    times = {"B": [], "I": [], "W": [], "I + W over B": []}
    bits = []
    for index in range(-5, rounds):
        # Gradients are added to what is there, as from the second microbatch on.
        for parameter in block.parameters():
            parameter.grad = torch.zeros_like(parameter)
        anchor = torch.zeros((), requires_grad=True)
        output = block(Enter.apply(anchor, x))
        start = clock.now()
        torch.autograd.backward([output], [seed])
        full = clock.now() - start
        expected = [Enter.gradient, *(p.grad for p in block.parameters())]
        for parameter in block.parameters():
            parameter.grad = torch.zeros_like(parameter)
        output = block(Enter.apply(anchor, x))
        start = clock.now()
        half = run_input_half([output], [seed], anchor)
        middle = clock.now()
        half.run()
        end = clock.now()
        got = [Enter.gradient, *(p.grad for p in block.parameters())]
        bits.append(all(torch.equal(a, b) for a, b in zip(got, expected, strict=True)))
        if index >= 0:
            parts = (full, middle - start, end - middle, (end - start) / full)
            for values, value in zip(times.values(), parts, strict=True):
                values.append(value)
    row = {name: record.quantiles(values) for name, values in times.items()}
    return {"width": width, "tokens": tokens, "dtype": str(dtype), "same_bits": all(bits), **row}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=list(SIZES), default="cpu")
    parser.add_argument("--rounds", type=int, default=40)
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
                  f"I + W over B {row['I + W over B'][1]:.3f}  same bits {row['same_bits']}")
    if arguments.out:
        device = torch.cuda.get_device_name() if arguments.device == "cuda" else "cpu"
        record.write(arguments.out, {"device": device, "rows": rows})


if __name__ == "__main__":
    main()
