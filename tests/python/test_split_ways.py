"""One memory for stages whose microbatches go different ways, are packed or have hooks."""

import gc
import types

import pytest
import torch
from split_modules import WIDTH, Counted, WeightOnly, entered
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from rrfp import cut_memory, gradient_graph
from rrfp.leaf_gradients import HookWatch
from rrfp.split_backward import SplitMemory, run_input_half


class _Plain(torch.autograd.Function):
    """Has the edges that a reentrant checkpoint of one tensor has."""

    @staticmethod
    def forward(ctx, function, preserve, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return None, None, gradient * 2


def _plain_microbatch(module):
    """(input, plain gradients of the parameters), whose own are None again."""
    x = torch.randn(4, WIDTH, dtype=torch.float64)
    module(x.clone().requires_grad_()).square().sum().backward()
    plain = [parameter.grad for parameter in module.parameters.values()]
    for parameter in module.parameters.values():
        parameter.grad = None
    return x, plain


def _check_gradients(module, wanted):
    for parameter, want in zip(module.parameters.values(), wanted, strict=True):
        assert (parameter.grad is None) == (want is None)
        if want is not None:
            assert torch.allclose(parameter.grad, want, rtol=1e-10, atol=1e-10)
        parameter.grad = None


def _gradients(memory, modules):
    """Parameter gradients of a microbatch for each module, through one memory and plain."""
    found = []
    for module in modules:
        x, plain = _plain_microbatch(module)
        anchor = torch.zeros((), requires_grad=True, dtype=torch.float64)
        loss = module(entered(anchor, x)).square().sum()
        half = run_input_half([loss], [torch.ones_like(loss)], anchor, memory=memory)
        half.run()
        _check_gradients(module, plain)
        found.append(half.fused_because)
    return found


class _Way:
    """A function with parameters a, b, c (matrices) and s (a vector)."""

    def __init__(self, function):
        torch.manual_seed(1)
        self.parameters = {
            name: nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.float64)) for name in "abc"
        }
        self.parameters["s"] = nn.Parameter(torch.randn(WIDTH, dtype=torch.float64))
        self.function = function

    def __call__(self, x):
        return self.function(x, **self.parameters)


_PAIRS = {
    "another kind": (lambda x, a, b, c, s: F.linear(x, a, s),
                     lambda x, a, b, c, s: torch.addcmul(s, x, a.t()[:4])),
    "shared or not": (lambda x, a, b, c, s: F.linear(x, a) @ b * c[:4],
                      lambda x, a, b, c, s: F.linear(x, a) @ b * b[:4]),
    "one more edge": (lambda x, a, b, c, s: torch.cat([F.linear(x, a), F.linear(x, b)]),
                      lambda x, a, b, c, s: torch.cat([F.linear(x, a), F.linear(x, b), c])),
    "a branch left out": (lambda x, a, b, c, s: F.linear(x, a, s) + F.linear(x, b),
                          lambda x, a, b, c, s: F.linear(x, a, s) + x),
    "a custom function": (lambda x, a, b, c, s: F.linear(_Plain.apply(None, True, x), a),
                          lambda x, a, b, c, s: F.linear(
                              checkpoint(lambda y: F.linear(y, b), x, use_reentrant=True), a)),
    "a custom twig": (lambda x, a, b, c, s: F.linear(x, WeightOnly.apply(a)) * s,
                      lambda x, a, b, c, s: F.linear(x, a.sin()) * s),
    "both paths": (lambda x, a, b, c, s: F.linear(x, a) + (F.linear(x, b, s) * s),
                   lambda x, a, b, c, s: F.linear(x, a) + (F.linear(x, b, s) * c[0])),
    "one function, other operand": (lambda x, a, b, c, s: F.linear(Counted.apply(x, s), a),
                                    lambda x, a, b, c, s: F.linear(Counted.apply(x, c[0]), a)),
}


@pytest.mark.parametrize("pair", _PAIRS)
def test_ways_through_a_stage_alternate(pair):
    ways = [_Way(function) for function in _PAIRS[pair]]
    for first, second in (ways, ways[::-1]):
        memory = SplitMemory(HookWatch())
        found = _gradients(memory, [first, second, first, second, second])
        alone = [_gradients(SplitMemory(), [way])[0] for way in (first, second)]
        assert found == [alone[0], alone[1], alone[0], alone[1], alone[1]]


def test_more_shapes_than_are_kept():
    memory = SplitMemory()
    ways = [_Way(lambda x, a, b, c, s, n=n: F.linear(sum([x] * n, x), a)) for n in range(6)]
    _gradients(memory, ways * 2)
    assert len(memory.cuts._known) == cut_memory._MAX_SHAPES


def test_tensors_packed_in_the_third_microbatch_are_unpacked_once():
    linear = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH))
    memory, counts = SplitMemory(), {"packed": 0, "unpacked": 0}

    def tally(what):
        def hook(tensor):
            counts[what] += 1
            return tensor
        return hook

    found = []
    for microbatch in range(4):
        anchor = torch.zeros((), requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(tally("packed"), tally("unpacked")) \
                if microbatch == 2 else torch.enable_grad():
            output = linear(entered(anchor, torch.randn(4, WIDTH)))
        half = run_input_half([output], [torch.ones_like(output)], anchor, memory=memory)
        half.run()
        found.append(half.fused_because)
    assert found == [None, None, gradient_graph.PACKED, None]
    assert counts["packed"] == counts["unpacked"] > 0


def test_nothing_stays_alive_but_numbers_and_types():
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH))
    memory = SplitMemory(HookWatch())
    for _ in range(3):
        anchor = torch.zeros((), requires_grad=True)
        output = module(Counted.apply(entered(anchor, torch.randn(4, WIDTH)), module[1].bias))
        run_input_half([output], [torch.ones_like(output)], anchor, memory=memory).run()
    assert memory.cuts._known and memory.watch.free
    seen, stack = set(), [memory]
    while stack:
        one = stack.pop()
        if id(one) in seen or isinstance(one, (type, types.ModuleType, types.FunctionType,
                                               types.BuiltinFunctionType)):
            continue
        seen.add(id(one))
        assert not isinstance(one, torch.Tensor) and not hasattr(one, "next_functions"), one
        stack.extend(gc.get_referents(one))
    assert len(seen) > 50


class _Writes(torch.autograd.Function):
    """Its backward changes the gradient that it is given, which others may have."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient.mul_(2)


def _hooked_gradients(in_one_step):
    """Of a stage whose second and fourth microbatches have a hook that changes a gradient;
    beside those of a plain loop."""
    torch.manual_seed(4)
    first, last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    memory, batches = SplitMemory(HookWatch()), torch.randn(4, 3, WIDTH)
    parameters = [*first.parameters(), *last.parameters()]

    def forward(microbatch, x):
        h = first(x)
        if microbatch % 2:
            h.register_hook(lambda gradient: 3 * gradient)
        return last(h)

    gradients = []
    for is_plain in (False, True):
        for microbatch, x in enumerate(batches):
            anchor = torch.zeros((), requires_grad=True)
            if not is_plain and (microbatch == 0 or not in_one_step):
                memory.begin_step()
            output = forward(microbatch, entered(anchor, x))
            if is_plain:
                output.backward(torch.ones_like(output))
            else:
                run_input_half([output], [torch.ones_like(output)], anchor, memory=memory).run()
        gradients.append([parameter.grad for parameter in parameters])
        for parameter in parameters:
            parameter.grad = None
    return gradients


@pytest.mark.parametrize("in_one_step", [True, False])
def test_hooks_of_tensors_change_what_is_put_off(in_one_step):
    got, want = _hooked_gradients(in_one_step)
    for one, other in zip(got, want, strict=True):
        assert torch.equal(one, other)


def test_hooks_of_tensors_would_be_missed_without_the_watch(monkeypatch):
    monkeypatch.setattr(SplitMemory, "has_no_hooks", lambda self: True)
    got, want = _hooked_gradients(False)
    assert not all(map(torch.equal, got, want))


def _written():
    """W of a product whose output gradient a custom function changes after it was taken."""
    torch.manual_seed(5)
    linear, other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    memory = SplitMemory(HookWatch())
    memory.begin_step()
    anchor = torch.zeros((), requires_grad=True)
    x = entered(anchor, torch.randn(3, WIDTH))
    z = _Writes.apply(other(x))
    output = linear(x) + z
    run_input_half([output], [torch.ones_like(output)], anchor, memory=memory).run()


def test_a_gradient_that_a_custom_function_changes_is_an_error(monkeypatch):
    with pytest.raises(RuntimeError, match="changed in place between"):
        _written()
    monkeypatch.setattr(gradient_graph, "_has_foreign", lambda *_: False)
    _written()  # unnoticed


@pytest.mark.parametrize("memory", [None, SplitMemory(HookWatch())])
def test_change_in_place_between_the_halves_is_an_error(memory):
    linear, buffer = nn.Linear(WIDTH, WIDTH), torch.randn(4, WIDTH)
    for changes in (False, True, False):
        anchor = torch.zeros((), requires_grad=True)
        factor = entered(anchor, buffer)
        output = linear(factor)
        half = run_input_half([output], [torch.ones_like(output)], anchor, memory=memory)
        assert half.fused_because is None
        if changes:
            factor.detach().add_(1)
            with pytest.raises(RuntimeError, match="changed in place between"):
                half.run()
        else:
            half.run()


@pytest.mark.parametrize("function", [
    lambda x, a, b, c, s: x @ WeightOnly.apply(a),
    lambda x, a, b, c, s: F.linear(x, WeightOnly.apply(a) + WeightOnly.apply(b), s),
], ids=["alone", "in a group"])
def test_a_custom_function_of_a_weight_lives_until_its_weight_half(function):
    """The pipeline drops the graph after I; torch before 2.13 then drops such a node."""
    module = _Way(function)
    x, plain = _plain_microbatch(module)
    memory = SplitMemory()
    for _ in range(2):  # the second by the kept cut
        anchor = torch.zeros((), requires_grad=True, dtype=torch.float64)
        loss = module(entered(anchor, x)).square().sum()
        half = run_input_half([loss], [torch.ones_like(loss)], anchor, memory=memory)
        assert half.fused_because is None
        del loss, anchor
        gc.collect()
        half.run()
    _check_gradients(module, [want if want is None else 2 * want for want in plain])
