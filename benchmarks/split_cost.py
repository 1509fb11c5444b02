"""What a split backward costs: I and W of a transformer block, against its full backward.

B and the halves alternate in every round; figures are medians and quartiles over rounds, per
microbatch of the few in flight, so that a GPU is not waited for after each. Also says whether the
bits are the same, and whether B itself repeats its bits.

With ``--host`` it is eight blocks so small that their arithmetic vanishes, on one CPU thread and
in that thread's own time, which leaves what the host pays; ``--instructions`` counts that under
callgrind, as the difference between two numbers of microbatches.

    python benchmarks/split_cost.py [--device cuda | --host [--instructions]] [--rounds 15]
        [--out split_cost]
"""

import argparse
import gc
import os
import re
import subprocess
import sys
import tempfile
import time

import record
import torch
from host_instructions import instrument
from torch import nn

from rrfp.leaf_gradients import HookWatch
from rrfp.split_backward import SplitMemory, run_input_half

SIZES = {  # (width, tokens) of a microbatch: as far as the device makes sense of
    "cpu": [(256, 256), (512, 512), (1024, 512)],
    "cuda": [(1024, 4096), (2048, 4096), (4096, 4096)],
}
HOST_WIDTHS, HOST_TOKENS, HOST_BLOCKS = (8, 32, 64), 4, 8
HEADS = 8
IN_FLIGHT = 4
FEW, MANY = 1, 4  # microbatches, in the difference of which instructions are counted


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
    def __init__(self, device, is_host):
        self.is_cuda = device == "cuda"
        self.read = time.thread_time if is_host else time.perf_counter

    def now(self):
        if self.is_cuda:
            torch.cuda.synchronize()
        return self.read()


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


def input_halves(runs, seed, memory):
    return [run_input_half([output], [seed], anchor, memory=memory) for anchor, output in runs]


def halves(block, batches, seed, clock, memory):
    """Seconds of an I, of a W, gradients."""
    memory.begin_step()
    runs = forwards(block, batches)
    start = clock.now()
    pending = input_halves(runs, seed, memory)
    middle = clock.now()
    for half in pending:
        half.run()
    end = clock.now()
    return (middle - start) / len(runs), (end - middle) / len(runs), gradients(block)


def same(some, others):
    return all(torch.equal(a, b) for a, b in zip(some, others, strict=True))


def make(width, tokens, device, dtype, num_blocks):
    """(blocks, microbatches, gradient of the output)."""
    torch.manual_seed(0)
    blocks = nn.Sequential(*[Block(width) for _ in range(num_blocks)]).to(device, dtype)
    length = min(tokens, 256)
    shape = (tokens // length, length, width)
    batches = [torch.randn(shape, device=device, dtype=dtype) for _ in range(IN_FLIGHT)]
    return blocks, batches, torch.randn(shape, device=device, dtype=dtype)


def measure(width, tokens, device, dtype, rounds, num_blocks=1, is_host=False):
    block, batches, seed = make(width, tokens, device, dtype, num_blocks)
    memory = SplitMemory(HookWatch())
    clock = Clock(device, is_host)
    times = {"B": [], "I": [], "W": [], "I + W over B": []}
    repeats, splits = [], []
    for index in range(-3, rounds):
        full_s, expected = full(block, batches, seed, clock)
        input_s, weight_s, got = halves(block, batches, seed, clock, memory)
        splits.append(same(got, expected))
        repeats.append(same(full(block, batches, seed, clock)[1], expected))
        if index >= 0:
            parts = (full_s, input_s, weight_s, (input_s + weight_s) / full_s)
            for values, value in zip(times.values(), parts, strict=True):
                values.append(value)
    row = {name: record.quantiles(values) for name, values in times.items()}
    bits = {"split has the bits of B": all(splits), "B has its own bits again": all(repeats)}
    return {"width": width, "tokens": tokens, "dtype": str(dtype), **bits, **row}


def count(width):
    """In a process that callgrind watches: a dump of each part at two numbers of microbatches."""
    block, batches, seed = make(width, HOST_TOKENS, "cpu", torch.float32, HOST_BLOCKS)
    memory = SplitMemory(HookWatch())
    clock = Clock("cpu", is_host=True)
    for _ in range(2):
        halves(block, batches, seed, clock, memory)
        full(block, batches, seed, clock)
    gc.collect()
    gc.disable()
    for part in "BIW":
        for number in (FEW, MANY):
            memory.begin_step()
            runs = forwards(block, batches[:number])
            pending = input_halves(runs, seed, memory) if part == "W" else []
            instrument("on")
            if part == "B":
                for _, output in runs:
                    torch.autograd.backward([output], [seed])
            elif part == "I":
                pending = input_halves(runs, seed, memory)
            else:
                for half in pending:
                    half.run()
            instrument("off")
            dump = ["callgrind_control", f"--dump={part}{number}", str(os.getpid())]
            subprocess.run(dump, check=True, capture_output=True)


def instructions(width):
    """Of each part, per microbatch."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        process = subprocess.run(
            ["valgrind", "--tool=callgrind", "--instr-atstart=no",
             f"--callgrind-out-file={folder}/out", sys.executable, __file__,
             "--counted", str(width)],
            env={**os.environ, "PYTHONHASHSEED": "0"}, capture_output=True, text=True, check=False,
        )
        if process.returncode:
            raise SystemExit(process.stderr[-2000:])
        for name in os.listdir(folder):
            with open(f"{folder}/{name}", encoding="utf-8") as file:
                text = file.read()
            part = re.search(r"Trigger: .*?\b([BIW]\d+)\b", text)
            if part is not None:
                found[part.group(1)] = int(re.search(r"^totals: (\d+)", text, re.M).group(1))
    return {part: round((found[f"{part}{MANY}"] - found[f"{part}{FEW}"]) / (MANY - FEW))
            for part in "BIW"}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=list(SIZES), default="cpu")
    parser.add_argument("--host", action="store_true", help="what the host pays alone")
    parser.add_argument("--instructions", action="store_true", help="of the host, for one width")
    parser.add_argument("--counted", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", default="split_cost", help="name of the result file, or empty")
    arguments = parser.parse_args()
    if arguments.host and arguments.device != "cpu":
        parser.error("--host runs on the CPU")
    if arguments.instructions and not arguments.host:
        parser.error("--instructions needs --host")
    if arguments.counted:
        torch.set_num_threads(1)
        count(arguments.counted)
        return
    dtypes = [torch.float32] if arguments.device == "cpu" else [torch.bfloat16, torch.float32]
    sizes = [(width, tokens, 1) for width, tokens in SIZES[arguments.device]]
    if arguments.host:
        torch.set_num_threads(1)
        sizes = [(width, HOST_TOKENS, HOST_BLOCKS) for width in HOST_WIDTHS]
    rows = []
    for dtype in dtypes:
        for width, tokens, num_blocks in sizes:
            row = measure(width, tokens, arguments.device, dtype, arguments.rounds, num_blocks,
                          arguments.host)
            rows.append(row)
            parts = "  ".join(f"{name} {1000 * row[name][1]:.2f} ms" for name in "BIW")
            print(f"{row['dtype']} width {width}: {parts}  "
                  f"I + W over B {row['I + W over B'][1]:.3f}  "
                  f"same bits {row['split has the bits of B']}, of B itself "
                  f"{row['B has its own bits again']}")
    results = {"rows": rows}
    if arguments.instructions:
        counts = results["instructions"] = instructions(HOST_WIDTHS[1])
        print(f"instructions: {counts}  "
              f"I + W over B {(counts['I'] + counts['W']) / counts['B']:.3f}")
    if arguments.out:
        device = torch.cuda.get_device_name() if arguments.device == "cuda" else "cpu"
        record.write(arguments.out, {"device": device, **results})


if __name__ == "__main__":
    main()
