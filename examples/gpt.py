"""The model and the text of train_gpt.py: plain PyTorch, nothing of rrfp in it."""

import random
import re
import sysconfig
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

VOCABULARY = 256  # bytes
SHORTEST = 32     # bytes; shorter documents are joined to the next one


class Block(nn.Module):
    def __init__(self, width, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        # Without biases: that of a key has no effect, so its gradient would be rounding alone.
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(),
                                 nn.Linear(4 * width, width))

    def forward(self, x):
        batch, length, width = x.shape
        heads = self.qkv(self.norm1(x)).view(batch, length, 3, self.num_heads, -1)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norm2(x))


class Stage(nn.Module):
    """Consecutive blocks; the first stage also embeds, the last one also predicts bytes."""

    def __init__(self, num_blocks, width, max_length, is_first, is_last):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width) if is_first else None
        self.positions = nn.Embedding(max_length, width) if is_first else None
        self.blocks = nn.Sequential(*[Block(width, num_heads=4) for _ in range(num_blocks)])
        self.head = None
        if is_last:
            self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, VOCABULARY))
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, x):
        if self.tokens is not None:
            x = self.tokens(x) + self.positions(torch.arange(x.shape[1], device=x.device))
        x = self.blocks(x)
        return x if self.head is None else self.head(x)


def make_stage(index, args):
    """Stage `index` of args.ranks; its weights depend on its index alone, not on who makes it."""
    share, extra = divmod(args.blocks, args.ranks)
    torch.manual_seed(1000 + index)
    return Stage(share + (index < extra), args.width, args.max_length,
                 is_first=index == 0, is_last=index == args.ranks - 1)


def make_optimizer(stages):
    parameters = [parameter for stage in stages.values() for parameter in stage.parameters()]
    return torch.optim.AdamW(parameters, lr=8e-4, betas=(0.9, 0.95), eps=1e-6)


def loss_per_token(logits, targets):
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Documents:
    """The sources of the installed Python as documents: each function, method or class with its
    documentation. Longer ones are cut to `max_length` bytes. Every process that asks gets the
    same batch for the same step."""

    def __init__(self, num_microbatches, max_length, num_files=150):
        stdlib = Path(sysconfig.get_paths()["stdlib"])
        files = sorted(stdlib.glob("*.py"))
        if not files:
            raise SystemExit(f"no Python sources in {stdlib}: this Python came without its "
                             "library in text form; use another one")
        self.num_microbatches, self.max_length = num_microbatches, max_length
        self.num_files = min(num_files, len(files))
        self.pieces = [piece for path in random.Random(0).sample(files, self.num_files)
                       for piece in self._split(path.read_bytes())]

    def _split(self, text):
        pieces, begun = [], b""
        for part in re.split(rb"\n(?= {0,4}(?:@|def |class |async def ))", text):
            begun = begun + b"\n" + part if begun else part
            if len(begun) >= SHORTEST:
                pieces.append(begun[: self.max_length + 1])
                begun = b""
        return pieces

    def batch(self, step):
        """(inputs, targets, lengths) of a step: per microbatch one document, (1, length)."""
        chosen = random.Random(step).sample(self.pieces, self.num_microbatches)
        rows = [torch.frombuffer(bytearray(piece), dtype=torch.uint8).long()[None]
                for piece in chosen]
        return ([row[:, :-1] for row in rows], [row[:, 1:] for row in rows],
                [row.shape[1] - 1 for row in rows])

    def describe(self):
        lengths = sorted(len(piece) - 1 for piece in self.pieces)
        share = sum(length == self.max_length for length in lengths) / len(lengths)
        return (f"text: {len(lengths)} documents of {self.num_files} files of this Python's "
                f"library; lengths {lengths[0]} to {lengths[-1]} bytes, median "
                f"{lengths[len(lengths) // 2]}, {share:.0%} cut")
