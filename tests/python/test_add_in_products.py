"""Weight gradients that a product adds to ``.grad`` itself: right, no work more, hooks obeyed."""

import collections
import random

import pytest
import torch
from split_modules import WIDTH, Counted, RandomStage, entered
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import rrfp
from rrfp.leaf_gradients import HookWatch
from rrfp.split_backward import SplitMemory, run_input_half

SEEDS = 300


class _Tally(TorchDispatchMode):
    """Counts operations by name."""

    def __init__(self):
        super().__init__()
        self.counts = collections.Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def _roots(module, x, gradients):
    outputs = module(x)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    return zip(*[(o, g) for o, g in zip(outputs, gradients) if o.requires_grad])


def _backward(module, x, gradients, is_source):
    """The plain backward of one microbatch."""
    anchor = torch.zeros((), requires_grad=True)
    torch.autograd.backward(*_roots(module, x if is_source else entered(anchor, x), gradients))


def _halves(module, x, gradients, memory, is_source):
    """I and W of one microbatch."""
    anchor = None if is_source else torch.zeros((), requires_grad=True)
    roots = _roots(module, x if is_source else entered(anchor, x), gradients)
    run_input_half(*map(list, roots), anchor, memory=memory).run()


@pytest.mark.parametrize("is_source", [False, True])
def test_random_stages(is_source):
    """Three microbatches each, with one memory for all stages; as a plain loop at 1e-10."""
    memory = SplitMemory(HookWatch())
    num_added = num_products = 0
    for seed in range(SEEDS):
        rng = random.Random(seed)
        module, plain = (RandomStage(seed, with_checkpoint=seed % 3 == 0) for _ in range(2))
        batches = [torch.randn(rng.choice((6, 7)), WIDTH, dtype=torch.float64) for _ in range(3)]
        seeds = [[torch.randn(len(x), WIDTH, dtype=torch.float64) for _ in range(3)]
                 for x in batches]
        text = f"seed {seed}: {module.text}"
        if not any(o.requires_grad for o in _outputs(module, batches[0])):
            continue
        calls = []
        for train in (
            lambda x, g, plain=plain: _backward(plain, x, g, is_source),
            lambda x, g, module=module: _halves(module, x, g, memory, is_source),
        ):
            Counted.calls = 0
            memory.begin_step(adds_in_products=True)
            with _Tally() as tally:
                for x, gradients in zip(batches, seeds):
                    train(x, gradients)
            calls.append((Counted.calls, tally.counts))
        (counted, of_plain), (also_counted, of_halves) = calls
        assert counted == also_counted, text
        products = of_halves["mm"] + of_halves["addmm_"]
        assert products == of_plain["mm"], text
        num_added += of_halves["addmm_"]
        num_products += products
        for (name, got), want in zip(module.named_parameters(), plain.parameters()):
            assert (got.grad is None) == (want.grad is None), f"{text}: {name}"
            if want.grad is not None:
                scale = 1 + want.grad.abs().max()
                assert (got.grad - want.grad).abs().max() <= 1e-10 * scale, f"{text}: {name}"
    print(f"{num_added} of {num_products} products were added to a gradient")
    assert num_added >= SEEDS


def _outputs(module, x):
    outputs = module(x)
    return outputs if isinstance(outputs, tuple) else (outputs,)


@pytest.mark.parametrize("is_source", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_every_weight_of_plain_layers_and_no_extra_pass(dtype, is_source):
    """After the first microbatch each weight takes one operation; biases take one addition."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8, bias=False)).to(dtype)
    memory = SplitMemory(HookWatch())
    memory.begin_step(adds_in_products=True)
    for number in range(3):
        with _Tally() as tally:
            _halves(module, torch.randn(5, 8).to(dtype), [torch.randn(5, 8).to(dtype)], memory,
                    is_source)
        assert tally.counts["addmm_"] == (2 if number else 0)
    assert tally.counts["_foreach_add_"] == 1 and tally.counts["add_"] == 0


def test_gradients_of_another_dtype_are_added_as_ever():
    """As a half-precision weight with a gradient in float32 has one (a main gradient)."""
    linear, memory = nn.Linear(4, 4, bias=False), SplitMemory(HookWatch())
    memory.begin_step(adds_in_products=True)
    linear.weight.grad = torch.zeros(4, 4, dtype=torch.float32)
    x = torch.randn(3, 4)
    with torch.autocast("cpu", torch.bfloat16):
        anchor = torch.zeros((), requires_grad=True)
        output = linear(entered(anchor, x))
    with _Tally() as tally:
        run_input_half([output], [torch.ones_like(output)], anchor, memory=memory).run()
    assert tally.counts["addmm_"] == 0
    assert linear.weight.grad.dtype is torch.float32 and linear.weight.grad.abs().sum() > 0


def _step(**options):
    module = nn.Linear(4, 4)
    return rrfp.run_pipeline([module], [torch.ones(2, 4)] * 3, [None] * 3,
                             lambda output, _: output.sum(), add_in_products=True, **options)


def test_is_refused_with_deterministic():
    with pytest.raises(ValueError, match="add_in_products rounds otherwise"):
        _step(deterministic=True)


@pytest.mark.parametrize("split", [None, True])
def test_a_pipeline_of_one_stage(split):
    """A source and loss stage at once, whose W is the whole backward."""
    with _Tally() as tally:
        _step(split_backward=split)
    assert tally.counts["addmm_"] == 0  # the tally sees this thread alone
    modules = nn.Linear(4, 4), nn.Linear(4, 4)
    modules[1].load_state_dict(modules[0].state_dict())
    batches = torch.randn(3, 2, 4).unbind()
    rrfp.run_pipeline([modules[0]], batches, [None] * 3, lambda o, _: o.square().sum(),
                      split_backward=split, add_in_products=True, loss_reduction="sum")
    for x in batches:
        modules[1](x).square().sum().backward()
    for got, want in zip(modules[0].parameters(), modules[1].parameters()):
        torch.testing.assert_close(got.grad, want.grad)
