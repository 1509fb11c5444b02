"""Random modules for the tests of split backward. Imports torch alone."""

import random

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

WIDTH = 6


def entered(anchor, tensor):
    """A tensor that depends on the anchor, as received ones do."""
    return tensor + 0 * anchor


class Counted(torch.autograd.Function):
    """x * w, with parameter and input gradients out of one backward that counts its calls."""

    calls = 0

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx, gradient):
        Counted.calls += 1
        x, w = ctx.saved_tensors
        return gradient * w, (gradient * x).sum(0)


class WeightOnly(torch.autograd.Function):
    """A transformation of a weight by a custom function."""

    @staticmethod
    def forward(ctx, w):
        ctx.save_for_backward(w)
        return w.sin()

    @staticmethod
    def backward(ctx, gradient):
        (w,) = ctx.saved_tensors
        return gradient * w.cos()


OPERATIONS = {
    "linear": lambda m, h, p: F.linear(h, p("w"), p("b")),
    "linear3": lambda m, h, p: F.linear(h.view(-1, 1, WIDTH), p("w"), p("b")).view_as(h),
    "no_bias": lambda m, h, p: F.linear(h, p("w")),
    "shared": lambda m, h, p: F.linear(h, m.w0, m.b0),
    "shared_bias": lambda m, h, p: F.linear(h, p("w"), m.b0) + m.b0,
    "tied_table": lambda m, h, p: h + F.embedding(torch.arange(len(h)) % WIDTH, m.w0),
    "right": lambda m, h, p: (p("w") @ h.t()).t(),
    "column_major": lambda m, h, p: h @ p("w").t().contiguous().t(),
    "addmm": lambda m, h, p: torch.addmm(p("b"), h, p("w"), beta=0.5, alpha=-1.5),
    "addmm_left": lambda m, h, p: torch.addmm(p("b"), p("w"), h.t()[:, :WIDTH], alpha=2.0)[:1] + h,
    "bmm": lambda m, h, p: torch.bmm(h.expand(2, -1, -1), p("w").expand(2, -1, -1)).sum(0),
    "baddbmm": lambda m, h, p: torch.baddbmm(p("b"), h[None], p("w")[None], alpha=0.3)[0],
    "conv": lambda m, h, p: F.conv1d(h[:, None], p("w")[:1, None, :3], p("b")[:1], padding=1)[:, 0],
    "layer_norm": lambda m, h, p: F.layer_norm(h, (WIDTH,), m.scale, m.b0),
    "scale": lambda m, h, p: h * m.scale,
    "custom": lambda m, h, p: Counted.apply(h, m.scale),
    "custom_weight": lambda m, h, p: F.linear(h, WeightOnly.apply(p("w"))),
    "normed_weight": lambda m, h, p: F.linear(h, p("w") / p("w").norm(), p("b").exp()),
    "gated_weight": lambda m, h, p: F.linear(h, m.w0 * m.scale),
    "query": lambda m, h, p: h + (F.softmax(p("w") @ h.t(), -1) @ h).mean(0),
    "quadratic": lambda m, h, p: h + F.linear(h, p("w")) * F.linear(h, p("w")),
    "in_place": lambda m, h, p: F.linear(h, p("w"), p("b")).mul_(2).add_(m.b0).relu_(),
    "tanh": lambda m, h, p: h.tanh(),
    "residual": lambda m, h, p: h + F.gelu(F.linear(h, p("w"), p("b"))),
    "cat": lambda m, h, p: torch.cat([h[:, :3], F.linear(h, p("w"))[:, 3:]], 1),
    "detached": lambda m, h, p: F.linear(h.detach(), p("w"), p("b")) + h,
    "indexed": lambda m, h, p: F.linear(h, p("w"))[torch.arange(len(h)).flip(0)],
    "frozen": lambda m, h, p: F.linear(h, m.frozen, p("b")),
    "parameter_alone": lambda m, h, p: h + (p("w") @ p("w")).sum(0),
}
CHECKPOINTED = ("checkpoint", "reentrant")


class RandomStage(nn.Module):
    """A few random operations; ``text`` says which. All of float64."""

    def __init__(self, seed, with_checkpoint=False):
        super().__init__()
        rng = random.Random(seed)
        torch.manual_seed(seed)
        self.w0, self.frozen = self._new("w"), nn.Parameter(self._new("w").data, False)
        self.b0, self.scale = self._new("b"), self._new("b")
        self.unused = self._new("b")
        names = rng.choices(list(OPERATIONS), k=rng.randint(1, 6))
        self.own = nn.ParameterList()
        self.plan = []
        for name in names:
            taken = {kind: len(self.own) + i for i, kind in enumerate("wb")}
            self.own.extend([self._new("w"), self._new("b")])
            mode = rng.choice(CHECKPOINTED) if with_checkpoint and rng.random() < 0.5 else "plain"
            self.plan.append((name, taken, mode))
        self.num_outputs = rng.randint(1, 3)
        self.text = " ".join(f"{mode}:{name}" for name, _, mode in self.plan)

    @staticmethod
    def _new(kind):
        shape = (WIDTH, WIDTH) if kind == "w" else (WIDTH,)
        return nn.Parameter(torch.randn(shape, dtype=torch.float64) / 2)

    def forward(self, *inputs):
        h = inputs[0] if len(inputs) == 1 else inputs[0] + 0.5 * inputs[1]
        outputs = []
        for name, taken, mode in self.plan:
            def run(h, name=name, taken=taken):
                return OPERATIONS[name](self, h, lambda kind: self.own[taken[kind]])
            if mode == "plain":
                h = run(h)
            else:
                h = checkpoint(run, h, use_reentrant=mode == "reentrant")
            outputs.append(h)
        if self.num_outputs == 1:
            return (h,)
        return (h, *(outputs[-i % len(outputs)] * i for i in range(1, self.num_outputs)))
