"""Gradients that W adds without autograd's engine: the same bits, and every hook fires."""

import inspect
import textwrap

import pytest
import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.utils.hooks import RemovableHandle

from rrfp import leaf_gradients, split_backward
from rrfp.leaf_gradients import HookWatch
from rrfp.split_backward import SplitMemory, run_input_half

WIDTH = 8
# The ways to set a hook on a parameter, each with what it is given.
_SETTERS = {
    "tensor": lambda p, f: p.register_hook(f),
    "after accumulation": lambda p, f: p.register_post_accumulate_grad_hook(f),
    "leaf": lambda p, f: get_gradient_edge(p).node.register_hook(f),
    "before the leaf": lambda p, f: get_gradient_edge(p).node.register_prehook(f),
    "several tensors": lambda p, f: torch.autograd.graph.register_multi_grad_hook([p], f),
}


def _module(dtype=torch.float64):
    torch.manual_seed(2)
    return nn.Sequential(
        nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
    ).to(dtype)


def _parameters_of(module):
    """One that is put off, its bias, and one that is kept, which may have no tensor hook."""
    return {"weight": module[0].weight, "bias": module[0].bias, "kept": module[1].weight}


def _microbatch(module, memory, seed=0, then=None):
    """I and W of one microbatch; ``then`` is called between its forward and I."""
    torch.manual_seed(seed)
    dtype = next(module.parameters()).dtype
    anchor = torch.zeros((), requires_grad=True)
    output = module(torch.randn(4, WIDTH).to(dtype) + (0 * anchor).to(dtype))
    if then is not None:
        then()
    half = run_input_half([output], [torch.randn(4, WIDTH).to(dtype)], anchor, memory=memory)
    half.run()
    return half


def _plain(module, seeds):
    """Gradients of a plain loop."""
    dtype = next(module.parameters()).dtype
    for seed in seeds:
        torch.manual_seed(seed)
        module(torch.randn(4, WIDTH).to(dtype)).backward(torch.randn(4, WIDTH).to(dtype))
    return {name: p.grad.clone() for name, p in module.named_parameters()}


def _num_engine_passes(monkeypatch):
    passes = []
    run = leaf_gradients.run_backward
    monkeypatch.setattr(
        leaf_gradients, "run_backward", lambda *a: passes.append(len(a[0])) or run(*a)
    )
    return passes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_same_bits_and_no_engine_once_there_are_gradients(dtype, monkeypatch):
    passes = _num_engine_passes(monkeypatch)
    module, memory = _module(dtype), SplitMemory(HookWatch())
    memory.begin_step()
    for seed in range(6):
        _microbatch(module, memory, seed)
    assert passes == [5]  # .grad is None before the first one
    expected = _plain(_module(dtype), range(6))
    for name, parameter in module.named_parameters():
        assert torch.equal(parameter.grad, expected[name]), name


@pytest.mark.parametrize("how", _SETTERS)
def test_every_way_to_set_a_hook_moves_the_counter(how):
    """What ``HookWatch`` stands on; red if a release of torch counts otherwise."""
    parameter = nn.Parameter(torch.zeros(2))
    before = RemovableHandle.next_id
    _SETTERS[how](parameter, lambda *_: None)
    assert RemovableHandle.next_id > before


def _hooked(how, name, in_products=False):
    """(times that a hook fired in each microbatch, whether it should have)."""
    module, memory = _module(), SplitMemory(HookWatch())
    memory.begin_step(in_products)
    parameter = _parameters_of(module)[name]
    calls, counts, wanted = [], [], []

    def fires(*_):
        calls.append(1)

    def run(seed, should, then=None):
        calls.clear()
        _microbatch(module, memory, seed, then)
        counts.append(len(calls))
        wanted.append(should)

    run(0, 0)
    run(1, 0)
    leaf = get_gradient_edge(parameter).node  # or the hook would go with it
    handle = _SETTERS[how](parameter, fires)
    run(2, 1)
    run(3, 1)
    handle.remove()
    run(4, 0)
    run(5, 0)
    handles = []
    run(6, 1, then=lambda: handles.append(_SETTERS[how](parameter, fires)))
    handles[0].remove()
    run(7, 0)
    del leaf
    expected = _plain(_module(), range(8))
    same = all(torch.allclose(p.grad, expected[n], rtol=1e-12, atol=1e-12)
               for n, p in module.named_parameters())
    return counts, wanted, same


@pytest.mark.parametrize("in_products", [False, True])
@pytest.mark.parametrize("name", ["weight", "bias", "kept"])
@pytest.mark.parametrize("how", _SETTERS)
def test_hooks_set_between_microbatches_fire(how, name, in_products):
    counts, wanted, same = _hooked(how, name, in_products)
    assert counts == wanted and same


def test_a_hook_set_in_another_stage_and_one_that_is_held_by_its_node_alone():
    module, memory = _module(), SplitMemory(HookWatch())
    _microbatch(module, memory)
    _microbatch(module, memory)
    fired = []

    def then():
        get_gradient_edge(module[0].weight).node.register_hook(lambda *_: fired.append(1))
        nn.Linear(2, 2).register_forward_hook(lambda *_: None)

    _microbatch(module, memory, then=then)  # the graph holds the node
    assert fired == [1]
    _microbatch(module, memory)
    assert fired == [1]


class _Transposed(nn.Module):
    """A product with a weight's transpose, which ``set_hook`` gets in every forward."""

    def __init__(self, set_hook):
        super().__init__()
        torch.manual_seed(2)
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.float64))
        self.set_hook = set_hook

    def forward(self, x):
        transpose = self.weight.t()
        self.set_hook(transpose)
        return x @ transpose


@pytest.mark.parametrize("in_products", [False, True])
@pytest.mark.parametrize("set_hook", [
    lambda t: t.register_hook(lambda g: 2 * g),
    lambda t: t.grad_fn.register_prehook(lambda gs: (2 * gs[0],)),
    lambda t: t.grad_fn.register_hook(lambda gs, _: (2 * gs[0],)),
], ids=["tensor", "before the node", "node"])
def test_hooks_of_a_transposed_weight_fire(set_hook, in_products):
    """It lies between the product and the leaf."""
    module, memory = _Transposed(set_hook), SplitMemory(HookWatch())
    for step in range(2):
        memory.begin_step(in_products)
        for seed in range(3):
            _microbatch(module, memory, 3 * step + seed)
    expected = _plain(_Transposed(set_hook), range(6))
    torch.testing.assert_close(module.weight.grad, expected["weight"], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["last.weight", "scaled"])
@pytest.mark.parametrize("mode", ["all", "any"])
def test_a_hook_of_several_tensors_fires_once_however_much_w_computes(name, mode, monkeypatch):
    """In every pass of the engine it would fire anew, with a part of the gradients."""
    monkeypatch.setattr(split_backward, "_BATCH_BYTES", 1)
    module = _Transposed(lambda t: None)
    module.last, module.scaled = _module()[2], nn.Parameter(torch.ones(WIDTH, WIDTH).double())
    hooked, calls = [module.weight, module.get_parameter(name)], []
    torch.autograd.graph.register_multi_grad_hook(hooked, calls.append, mode=mode)
    memory = SplitMemory(HookWatch())
    for seed in range(3):
        memory.begin_step()
        anchor = torch.zeros((), requires_grad=True)
        output = module.last(module(torch.randn(4, WIDTH).double() + anchor) @ (2 * module.scaled))
        run_input_half([output], [torch.ones_like(output)], anchor, memory=memory).run()
        assert len(calls) == seed + 1
        assert mode == "any" or all(gradient is not None for gradient in calls[-1])


_WEAKENED = {
    "look": ("look", "self.free.clear()", "pass"),
    "own hooks": ("look", "if RemovableHandle.next_id != self._counted:",
                  "if RemovableHandle.next_id != self._counted and len(self.free) < 2:"),
    "tensor hooks": ("is_free", "variable._backward_hooks or ", ""),
    "post-accumulate hooks": ("is_free", " or variable._post_accumulate_grad_hooks", ""),
    "hooks of the node": ("is_free", "if hooks:", "if False:"),
    "prehooks of the node": ("is_free", "(leaf.register_prehook, leaf.register_hook)",
                             "(leaf.register_hook,)"),
}


@pytest.mark.parametrize("check", _WEAKENED)
def test_each_check_is_missed(check, monkeypatch):
    name, old, new = _WEAKENED[check]
    source = textwrap.dedent(inspect.getsource(getattr(HookWatch, name)))
    assert source.count(old) == 1, "the source has changed"
    scope = dict(vars(leaf_gradients))
    exec(compile(source.replace(old, new), leaf_gradients.__file__, "exec"), scope)
    monkeypatch.setattr(HookWatch, name, scope[name])
    results = [_hooked(how, "bias") for how in _SETTERS]
    assert any(counts != wanted for counts, wanted, _ in results)


class _Special(nn.Parameter):
    pass


@pytest.mark.parametrize(
    "change",
    [
        lambda m: setattr(m[0].bias, "grad", None),
        lambda m: m[0].weight.requires_grad_(False),
        lambda m: setattr(m[0].weight, "grad", m[0].weight.grad.t().contiguous().t()),
        lambda m: setattr(m[2].weight, "grad", m[0].weight.grad),
        lambda m: setattr(m[0], "weight", _Special(m[0].weight.data)),
        lambda m: setattr(m[0].weight, "grad", m[0].weight.grad.to_sparse()),
        lambda m: setattr(m[0].weight, "grad", torch._neg_view(m[0].weight.grad)),
    ],
    ids=["none", "frozen", "column major", "one memory", "special parameter", "sparse gradient",
         "lazily negated"],
)
def test_odd_gradients_are_those_of_a_plain_loop(change):
    modules = _module(), _module()
    memory = SplitMemory(HookWatch())
    _microbatch(modules[0], memory, 0)
    _microbatch(modules[0], memory, 1)
    _plain(modules[1], (0, 1))
    for module in modules:
        change(module)
    _microbatch(modules[0], memory, 2)
    _microbatch(modules[0], memory, 3)
    for seed in (2, 3):
        torch.manual_seed(seed)
        output = modules[1](torch.randn(4, WIDTH).to(torch.float64))
        output.backward(torch.randn(4, WIDTH).to(torch.float64))
    pairs = zip(modules[0].parameters(), modules[1].parameters(), strict=True)
    for got, want in pairs:
        assert (got.grad is None) == (want.grad is None)
        if want.grad is not None:
            assert got.grad.layout is want.grad.layout
            assert torch.equal(got.grad.to_dense(), want.grad.to_dense())


def test_sparse_gradients_of_an_embedding_are_added():
    """A kept parameter whose gradients have no strides."""
    table = nn.Embedding(5, WIDTH, sparse=True)
    memory, seeds = SplitMemory(HookWatch()), torch.randn(3, 4, WIDTH)
    for seed in seeds:
        anchor = torch.zeros((), requires_grad=True)
        output = table(torch.tensor([0, 1, 1, 4])) + anchor
        run_input_half([output], [seed], anchor, memory=memory).run()
    got, table.weight.grad = table.weight.grad.to_dense(), None
    for seed in seeds:
        table(torch.tensor([0, 1, 1, 4])).backward(seed)
    assert torch.equal(got, table.weight.grad.to_dense())


def test_without_a_watch_the_engine_adds(monkeypatch):
    passes = _num_engine_passes(monkeypatch)
    module, memory = _module(), SplitMemory()
    for seed in range(3):
        _microbatch(module, memory, seed)
    assert passes == [5, 5, 5]


def test_a_hook_of_another_thread_is_not_taken_for_an_own():
    """Set between a look and the hooks by which the watch looks at another leaf."""
    modules = _module()
    first, second = modules[0].weight, modules[2].weight
    leaves = [torch.autograd.graph.get_gradient_edge(p).node for p in (first, second)]
    watch = HookWatch()
    watch.look()
    assert watch.is_free(leaves[0], first) and id(first) in watch.free
    first.register_hook(lambda gradient: None)
    assert watch.is_free(leaves[1], second)
    watch.look()
    assert not watch.free and not watch.is_free(leaves[0], first)
