"""Small models that break a naive pipeline, each a function ``name(seed) -> Scenario``.

A scenario is built anew from its seed in every process, so nothing has to be pickled. Stages
are written as plain functions over a bag of parameters. Here: what crosses the boundaries;
parity_autograd.py: what autograd does with it.
"""

import collections
from dataclasses import dataclass, field

import torch
from torch import nn

W = 4
Pair = collections.namedtuple("Pair", ["left", "right"])


@dataclass
class Scenario:
    """``steps`` holds (inputs, targets) per step; ``stage_kwargs`` as in run_pipeline."""

    stages: list
    steps: list
    loss_fn: object
    stage_kwargs: dict | None = None
    tolerance: float = 1e-10


class Stage(nn.Module):
    """Calls ``body(self, *args, **kwargs)``; owns a Linear and a vector nobody has to use."""

    def __init__(self, index, body, dtype=torch.float64, linear=True):
        super().__init__()
        generator = torch.Generator().manual_seed(100 + index)
        self.body = body
        if linear:
            self.lin = nn.Linear(W, W, dtype=dtype)
            self.vec = nn.Parameter(torch.empty(W, dtype=dtype))
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.6)

    def forward(self, *args, **kwargs):
        return self.body(self, *args, **kwargs)


@dataclass
class Data:
    """Seeded tensors."""

    seed: int
    generator: torch.Generator = field(init=False)

    def __post_init__(self):
        self.generator = torch.Generator().manual_seed(self.seed)

    def rows(self, count, dtype=torch.float64):
        return torch.randn(count, W, generator=self.generator, dtype=torch.float64).to(dtype)


def first_tensor(output):
    while not isinstance(output, torch.Tensor):
        output = next(iter(output.values())) if isinstance(output, dict) else output[0]
    return output


def squared_error(output, target):
    return (first_tensor(output) - target).square().sum()


def scenario(
    bodies, seed, count=5, steps=1, lengths=None, dtype=torch.float64, numbered=False, **options
):
    """A chain of the given stage bodies over random rows, ``count`` microbatches a step."""
    data = Data(seed)
    batches = []
    for step in range(steps):
        sizes = lengths(step) if lengths else [3] * count
        inputs = [data.rows(n, dtype) for n in sizes]
        if numbered:
            inputs = [(x, m) for m, x in enumerate(inputs)]
        batches.append((inputs, [data.rows(n, dtype) for n in sizes]))
    stages = [Stage(i, body, dtype) for i, body in enumerate(bodies)]
    options.setdefault("loss_fn", squared_error)
    return Scenario(stages=stages, steps=batches, **options)


def plain(self, x):
    return torch.tanh(self.lin(x)) + self.vec


def views(seed):
    """Outputs that are views of something larger."""

    def shifted(self, x):
        return torch.tanh(self.lin(x)).repeat(2, 1)[1 : 1 + len(x)]

    def transposed_twice(self, x):
        return self.lin(x).t().contiguous().t()

    flattened = lambda s, x: plain(s, x).view(-1).view(-1, W)  # noqa: E731
    return scenario([shifted, transposed_twice, flattened], seed)


def chunks(seed):
    """torch.chunk: outputs that share one storage, and a multi-output view node."""

    def split(self, x):
        return torch.chunk(self.lin(x), 2, dim=-1)

    def join(self, left, right):
        return tuple(torch.cat([left, right * 2], -1).mul(self.vec).split(1, dim=-1))

    return scenario([split, join, lambda s, *parts: plain(s, torch.cat(parts, -1))], seed)


def expanded(seed):
    """Outputs with stride 0: more elements than storage."""

    def widen(self, x):
        return self.lin(x)[:, :1].expand(-1, W), self.vec.expand(len(x), W)

    return scenario([widen, lambda s, a, b: plain(s, a * b), plain], seed)


def integers_and_bools(seed):
    def produce(self, x):
        hidden = plain(self, x)
        return hidden, hidden.argmax(-1), hidden > 0

    def pass_on(self, hidden, index, mask):
        return torch.where(mask, hidden, hidden * 0.5) + self.lin.weight[index], index + 0, mask

    def consume(self, hidden, index, mask):
        return plain(self, hidden) * mask + self.lin.weight[index]

    return scenario([produce, pass_on, consume], seed)


def none_in_the_tree(seed):
    def produce(self, x):
        return None, plain(self, x), None

    def middle(self, nothing, x, also_nothing):
        assert nothing is None and also_nothing is None
        return plain(self, x), None

    return scenario([produce, middle, lambda s, x, none: plain(s, x)], seed)


def dictionaries(seed):
    """A dict is one argument, and keeps its keys and their order."""

    def produce(self, x):
        return {"z": self.lin(x), "a": {"inner": x * self.vec}, "n": 3}

    def middle(self, d):
        assert list(d) == ["z", "a", "n"] and d["n"] == 3
        return {"h": plain(self, d["z"]) + d["a"]["inner"]}

    return scenario([produce, middle, lambda s, d: {"out": plain(s, d["h"])}], seed)


def nested_and_picklable(seed):
    """Lists stay lists, tuples tuples, named tuples their class; small values travel along."""

    def produce(self, x):
        return [Pair(self.lin(x), (x * self.vec, [x])), "text", 1.5, {"k": (1, None)}]

    def middle(self, tree):
        pair, text, number, table = tree
        assert type(tree) is list and type(pair) is Pair and type(pair.right[1]) is list
        assert (text, number, table) == ("text", 1.5, {"k": (1, None)})
        return Pair(plain(self, pair.left + pair.right[0]), torch.float16), (slice(1, 2), b"\0")

    def last(self, pair, rest):
        assert pair.right is torch.float16 and rest == (slice(1, 2), b"\0")
        return plain(self, pair.left)

    return scenario([produce, middle, last], seed)


def one_element_tuple(seed):
    return scenario(
        [
            lambda s, x: (plain(s, x),),
            lambda s, x: [plain(s, x)],
            lambda s, items: plain(s, items[0]),
        ],
        seed,
    )


def zero_size(seed):
    """Empty tensors travel, also as whole microbatches."""

    def produce(self, x):
        return plain(self, x), x.new_zeros(0, W) * self.vec, x.new_zeros(0, dtype=torch.int32)

    def middle(self, x, empty, ints):
        assert empty.shape == (0, W) and ints.shape == (0,) and ints.dtype == torch.int32
        return plain(self, x), empty.sum()

    return scenario(
        [produce, middle, lambda s, x, total: plain(s, x) + total],
        seed,
        lengths=lambda step: [2, 0, 1, 0, 3],
    )


def zero_dimensional(seed):
    def produce(self, x):
        return self.lin(x).sum(), torch.tensor(2, dtype=torch.int8), x

    return scenario(
        [
            produce,
            lambda s, a, b, x: (a * b + s.vec.sum(), plain(s, x)),
            lambda s, a, x: plain(s, x) * a,
        ],
        seed,
    )


def half_precision(seed, dtype):
    return scenario([plain, plain, plain], seed, dtype=dtype, tolerance=0.05)


def bfloat16(seed):
    return half_precision(seed, torch.bfloat16)


def float16(seed):
    return half_precision(seed, torch.float16)


def complex_numbers(seed):
    def produce(self, x):
        return torch.complex(self.lin(x), x * self.vec)

    def middle(self, z):
        return z * torch.complex(self.vec, self.lin.bias)

    return scenario([produce, middle, lambda s, z: plain(s, z.real - z.imag)], seed)


def non_contiguous(seed):
    def strided(self, x):
        return self.lin(x).repeat(1, 2)[:, ::2], x.flip(0).t().mul(self.vec[:, None])

    return scenario(
        [strided, lambda s, a, b: plain(s, a + b.t()).t(), lambda s, x: plain(s, x.t())], seed
    )


def changing_shapes(seed):
    """Rows and rank of the boundary differ by microbatch and by step."""

    def reshape(self, x):
        hidden = plain(self, x)
        return hidden.reshape(-1) if len(x) % 2 else hidden[None]

    return scenario(
        [reshape, lambda s, x: plain(s, x.reshape(-1, W)), plain],
        seed,
        steps=3,
        lengths=lambda step: [1 + (3 * m + step) % 5 for m in range(3 + step)],
    )


def keyword_arguments(seed):
    data = Data(seed + 1)
    masked = scenario(
        [
            lambda s, x, mask, gain=1.0: plain(s, x * mask) * gain,
            plain,
            lambda s, x, mask=None: plain(s, x) if mask is None else x * mask,
        ],
        seed,
    )
    masked.stage_kwargs = {
        0: [{"mask": data.rows(3), "gain": float(m)} for m in range(5)],
        2: [{"mask": data.rows(3)} if m % 2 else {} for m in range(5)],
    }
    return masked


def list_input(seed):
    """A microbatch that is not a tuple is one argument, whatever it is."""
    built = scenario([lambda s, d: plain(s, d["x"]) + d["y"][0], plain, plain], seed)
    built.steps = [([{"x": x, "y": [x * 2]} for x in i], t) for i, t in built.steps]
    return built


_ALL = [
    views, chunks, expanded, integers_and_bools, none_in_the_tree, dictionaries,
    nested_and_picklable, one_element_tuple, zero_size, zero_dimensional, bfloat16, float16,
    complex_numbers, non_contiguous, changing_shapes, keyword_arguments, list_input,
]  # fmt: skip
SCENARIOS = {function.__name__: function for function in _ALL}
