"""Split backward: I then W equals the plain backward, and each piece of work is done once."""

import collections
import gc
import random
import weakref

import pytest
import torch
from split_modules import WIDTH, Counted, RandomStage
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from rrfp import gradient_graph
from rrfp.leaf_gradients import HookWatch
from rrfp.split_backward import SplitMemory, run_input_half

SEEDS = 400


class _Receive(torch.autograd.Function):
    """Received tensors enter the graph; their gradients end in the list."""

    @staticmethod
    def forward(ctx, anchor, found, *tensors):
        ctx.set_materialize_grads(False)
        ctx.found = found
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx, *gradients):
        ctx.found.extend(gradients)
        return (None, None) + (None,) * len(gradients)


class _Run:
    """A forward on received tensors, and its two halves."""

    def __init__(self, module, *inputs, source=False):
        self.gradients = []
        self.anchor = None
        if not source:
            self.anchor = torch.zeros((), requires_grad=True)
            inputs = _Receive.apply(self.anchor, self.gradients, *inputs)
        outputs = module(*inputs)
        self.outputs = outputs if isinstance(outputs, tuple) else (outputs,)

    def input_half(self, seeds, memory=None):
        roots = _with_gradient(self.outputs, seeds)
        self.half = run_input_half(*roots, self.anchor, memory=memory)
        self.outputs = ()
        return self.half


def _with_gradient(outputs, seeds):
    pairs = [(o, s) for o, s in zip(outputs, seeds) if s is not None and o.requires_grad]
    return [o for o, _ in pairs], [s for _, s in pairs]


def _plain(module, batches, seeds):
    """(input gradients per microbatch, parameter gradients) of a plain loop."""
    module.zero_grad()
    found = []
    for inputs, seed in zip(batches, seeds):
        leaves = [tensor.detach().clone().requires_grad_() for tensor in inputs]
        outputs = module(*(leaf.view_as(leaf) for leaf in leaves))
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        torch.autograd.backward(*_with_gradient(outputs, seed))
        found.append([leaf.grad for leaf in leaves])
    gradients = {name: p.grad for name, p in module.named_parameters()}
    module.zero_grad()
    return found, gradients


def _assert_equal(got, expected, text):
    if expected is None:
        assert got is None, text
        return
    assert got is not None, text
    scale = 1 + expected.abs().max()
    assert (got - expected).abs().max() <= 1e-10 * scale, text


@pytest.mark.parametrize("with_checkpoint", [False, True])
@pytest.mark.parametrize("block", range(8))
def test_random_stages(block, with_checkpoint):
    """Several microbatches in flight, W in random order; equal to a plain loop at 1e-10, with one
    memory for all stages."""
    num_split = num_fused = 0
    memory = SplitMemory(HookWatch())
    for seed in range(block * SEEDS // 8, (block + 1) * SEEDS // 8):
        rng = random.Random(seed)
        module = RandomStage(seed, with_checkpoint)
        batches = [
            [torch.randn(rng.choice((6, 7)), WIDTH, dtype=torch.float64)] * rng.choice((1, 2))
            for _ in range(3)
        ]
        seeds = []
        for inputs in batches:
            given = [torch.randn(len(inputs[0]), WIDTH, dtype=torch.float64) for _ in range(3)]
            if rng.random() < 0.2:
                given[rng.randrange(module.num_outputs)] = None
            seeds.append(given)
        text = f"seed {seed}: {module.text}"
        Counted.calls = 0
        expected_inputs, expected = _plain(module, batches, seeds)
        plain_calls, Counted.calls = Counted.calls, 0
        memory.begin_step()
        runs = [_Run(module, *inputs) for inputs in batches]
        for index in rng.sample(range(3), 3):
            half = runs[index].input_half(seeds[index], memory)
            num_split += half.fused_because is None
            num_fused += half.fused_because is not None
        for index in rng.sample(range(3), 3):
            runs[index].half.run()
        assert Counted.calls == plain_calls, text
        for run, expected_of_inputs in zip(runs, expected_inputs):
            for got, want in zip(run.gradients or [None, None], expected_of_inputs):
                _assert_equal(got, want, text)
        for name, parameter in module.named_parameters():
            _assert_equal(parameter.grad, expected[name], f"{text}: {name}")
    assert num_split >= 10 and num_fused >= 1


class _Tally(TorchDispatchMode):
    """Counts the operations that do the work."""

    HEAVY = ("mm", "addmm", "bmm", "baddbmm", "convolution_backward", "native_layer_norm_backward",
             "gelu_backward", "_softmax_backward_data")

    def __init__(self):
        super().__init__()
        self.counts = collections.Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name in self.HEAVY:
            # One convolution_backward yields several gradients, according to its mask.
            self.counts[name] += sum(args[-1]) if name == "convolution_backward" else 1
        return func(*args, **(kwargs or {}))


class _Block(nn.Module):
    """Attention, a convolution and an MLP with residuals."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.norm = nn.LayerNorm(16)  # used twice
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16, bias=False)
        self.mix = nn.Conv1d(16, 16, 3, padding=1)
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        x = x + self.out(F.softmax(q @ k.transpose(1, 2), -1) @ v)
        x = x + self.mix(x.transpose(1, 2)).transpose(1, 2)
        return x + self.down(F.gelu(self.up(self.norm(x))))


@pytest.mark.parametrize("watches", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_block_has_the_same_bits_and_no_work_twice(dtype, watches):
    module = _Block().to(dtype)
    memory = SplitMemory(HookWatch() if watches else None)
    batches = [[torch.randn(2, 5, 16).to(dtype)] for _ in range(3)]
    seeds = [[torch.randn(2, 5, 16).to(dtype)] for _ in range(3)]
    with _Tally() as plain:
        expected_inputs, expected = _plain(module, batches, seeds)
    memory.begin_step()
    with _Tally() as split:
        runs = [_Run(module, *inputs) for inputs in batches]
        for index in (2, 0, 1):
            assert runs[index].input_half(seeds[index], memory).fused_because is None
        assert all(parameter.grad is None for parameter in module.parameters())
        for run in runs:
            run.half.run()
    assert split.counts == plain.counts
    for run, (want,) in zip(runs, expected_inputs):
        assert torch.equal(run.gradients[0], want)
    for name, parameter in module.named_parameters():
        assert torch.equal(parameter.grad, expected[name]), name


def _half(module, inputs=None, source=False):
    x = torch.randn(4, WIDTH) if inputs is None else inputs
    run = _Run(module, x, source=source)
    run.input_half([torch.randn_like(output) for output in run.outputs])
    return run


def test_source_stage_does_all_of_it_at_w():
    module = nn.Linear(WIDTH, WIDTH)
    half = _half(module, source=True).half
    assert module.weight.grad is None and half.fused_because is None
    half.run()
    assert module.weight.grad is not None and module.bias.grad is not None


@pytest.mark.parametrize(
    ("wrap", "reason"),
    [
        (lambda linear: lambda x: checkpoint(linear, x, use_reentrant=False),
         gradient_graph.PACKED),
        (lambda linear: lambda x: checkpoint(linear, x, use_reentrant=True),
         gradient_graph.REENTRANT),
        (lambda linear: torch.compile(linear, backend="aot_eager"), gradient_graph.COMPILED),
        (lambda linear: lambda x: x * linear.bias, gradient_graph.NO_PRODUCT),
        (lambda linear: torch.relu, gradient_graph.NO_PARAMETER),
    ],
    ids=["checkpoint", "reentrant", "compiled", "scale", "bare"],
)
def test_fused_stages_say_why(wrap, reason):
    linear = nn.Linear(WIDTH, WIDTH)
    calls = []
    linear.register_forward_pre_hook(lambda *_: calls.append(None))
    run = _half(wrap(linear))
    assert run.half.fused_because == reason
    assert run.gradients[0] is not None
    before = linear.bias.grad
    run.half.run()
    assert linear.bias.grad is before
    if "checkpoint" in reason:
        assert len(calls) == 2  # the forward, and one recomputation


def test_kept_parameter_with_a_hook_is_fused_and_put_off_one_is_not():
    norm, linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
    seen = []
    linear.weight.register_hook(lambda g: seen.append("weight") or 2 * g)
    run = _half(nn.Sequential(norm, linear))
    assert run.half.fused_because is None and seen == []
    run.half.run()
    assert seen == ["weight"]
    norm.weight.register_hook(lambda g: seen.append("norm") or 2 * g)
    half = _half(nn.Sequential(norm, linear)).half
    assert half.fused_because == gradient_graph.HOOKED
    assert seen == ["weight", "norm", "weight"] or seen == ["weight", "weight", "norm"]


def test_hooks_fire_once_and_change_gradients():
    first, norm, last = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
    module = nn.Sequential(first, norm, last)
    log = []

    def forward(x):
        h = first(x)
        h.register_hook(lambda g: log.append("tensor") or 3 * g)
        h.retain_grad()
        forward.hidden = h
        return last(norm(h))

    last.register_full_backward_hook(lambda *_: log.append("module"))
    for name, parameter in module.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda p, name=name: log.append(name))
    x, seed = torch.randn(4, WIDTH), torch.randn(4, WIDTH)
    run = _Run(forward, x)
    run.input_half([seed])
    assert sorted(log) == ["module", "tensor"]
    assert forward.hidden.grad is not None
    run.half.run()
    assert sorted(log[2:]) == sorted(name for name, _ in module.named_parameters())
    got = {name: p.grad for name, p in module.named_parameters()}
    module.zero_grad()
    leaf = x.clone().requires_grad_()
    forward(leaf.view_as(leaf)).backward(seed)
    assert torch.equal(run.gradients[0], leaf.grad)
    for name, parameter in module.named_parameters():
        assert torch.equal(parameter.grad, got[name]), name


def test_activations_are_freed_at_i_and_the_factors_of_products_at_w():
    linear = nn.Linear(WIDTH, WIDTH)
    activations, factors = [], []

    def module(x):
        h = linear(x)
        activations.append(weakref.ref(h))
        h = h.square() * 2
        factors.append(weakref.ref(h))
        return linear(h).exp()

    x = torch.randn(4, WIDTH)
    run = _Run(module, x)
    seeds = [torch.randn_like(output) for output in run.outputs]
    assert activations[0]() is not None and factors[0]() is not None
    half = run.input_half(seeds)
    gc.collect()
    assert activations[0]() is None and factors[0]() is not None
    half.run()
    gc.collect()
    assert factors[0]() is None
