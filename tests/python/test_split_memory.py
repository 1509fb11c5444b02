"""A cut kept from an earlier microbatch is used only where a fresh look would find the same.

Stages change between microbatches in every way that a cut rests on. The last test weakens each
check of ``CutMemory`` in turn: the first test must notice.
"""

import inspect
import random
import textwrap
import types

import pytest
import torch
from split_modules import WIDTH, RandomStage, entered

from rrfp import backward_graph, cut_memory, gradient_graph, products
from rrfp.cut_memory import CutMemory

SEEDS = 150
CHANGES = 6


def _alias(stage, rng):
    """Two operations share a parameter from now on."""
    shape = rng.choice([(WIDTH, WIDTH), (WIDTH,)])
    places = [i for i, parameter in enumerate(stage.own) if parameter.shape == shape]
    one, other = rng.choice(places), rng.choice(places)
    stage.own[one] = stage.own[other]


def _freeze(stage, rng):
    parameter = rng.choice(list(stage.parameters()))
    parameter.requires_grad_(not parameter.requires_grad)


def _hook(stage, rng):
    parameter = rng.choice([p for p in stage.parameters() if p.requires_grad] or [None])
    if parameter is not None:
        parameter.register_hook(lambda gradient: None)


def _unhook(stage, rng):
    for parameter in stage.parameters():
        if parameter._backward_hooks:
            parameter._backward_hooks.clear()


def _checkpoint(stage, rng):
    place = rng.randrange(len(stage.plan))
    name, taken, mode = stage.plan[place]
    stage.plan[place] = (name, taken, "plain" if mode != "plain" else "checkpoint")


def _pack(stage, rng):
    stage.packs = not stage.packs


def _swap(stage, rng):
    one, other = rng.randrange(len(stage.plan)), rng.randrange(len(stage.plan))
    stage.plan[one], stage.plan[other] = stage.plan[other], stage.plan[one]


def _enter_elsewhere(stage, rng):
    """What the stage receives takes no gradient, but another leaf stands there."""
    stage.other = None if stage.other is not None else torch.zeros((), requires_grad=True)


def _output(stage, rng):
    stage.num_outputs = rng.randint(1, 3)


_CHANGES = (_alias, _alias, _freeze, _hook, _unhook, _checkpoint, _pack, _swap, _output,
            _enter_elsewhere)


def _forward(stage, anchor, rng):
    x = torch.randn(rng.choice((6, 7)), WIDTH, dtype=torch.float64)
    if stage.other is not None:
        anchor = stage.other
    if not stage.packs:
        return stage(entered(anchor, x))
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        return stage(entered(anchor, x))


def _described(graph):
    if graph is None:
        return None
    cut = graph.cut
    put_off = [(p.place, type(p.product), p.product.indices, p.product.is_leaf, *p[2:])
               for p in cut.put_off]
    return cut.fused_because, sorted(put_off), cut.kept


def _num_wrong(seeds):
    """How often what the memory says differs from a fresh look; how often it remembered."""
    num_wrong = num_remembered = 0
    for seed in seeds:
        rng = random.Random(seed)
        stage = RandomStage(seed)
        stage.packs, stage.other = False, None
        memory, anchor = CutMemory(), torch.zeros((), requires_grad=True)
        for _ in range(CHANGES):
            roots = [o for o in _forward(stage, anchor, rng) if o.requires_grad]
            if rng.random() < 0.2:
                anchor = None  # a source stage, of which weight gradients alone are wanted
            fresh = _described(CutMemory().cut(roots, anchor))
            before = [id(cut) for *_, cut in memory._known]
            try:
                found = memory.cut(roots, anchor)
                num_wrong += _described(found) != fresh
                num_remembered += found is not None and id(found.cut) in before
            except (AttributeError, IndexError, TypeError):
                num_wrong += 1
            for _ in range(rng.choice((0, 1, 1, 2))):
                rng.choice(_CHANGES)(stage, rng)
            if anchor is None or rng.random() < 0.1:
                anchor = torch.zeros((), requires_grad=True)
    return num_wrong, num_remembered


def test_what_is_remembered_is_what_a_fresh_look_finds():
    num_wrong, num_remembered = _num_wrong(range(SEEDS))
    assert num_wrong == 0
    assert num_remembered >= SEEDS


def _weakened(function, module, old, new):
    """The function with a part of its source replaced."""
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(old) == 1, f"the source has changed: {old}"
    scope = dict(vars(module))
    exec(compile(source.replace(old, new), module.__file__, "exec"), scope)
    made = scope[function.__name__]
    return made if isinstance(made, types.FunctionType) else made.__func__


_SHAPE = backward_graph.GraphShape
_WEAKENED = {
    "kinds": (_SHAPE, "find", backward_graph, "if kinds != self._kinds:", "if False:"),
    "number of edges": (_SHAPE, "find", backward_graph, "if len(found) != count:", "if False:"),
    "known nodes": (_SHAPE, "find", backward_graph,
                    "if (*map(_node_of, edges), nodes[0], nodes[0]) != self._targets_in(nodes):",
                    "if False:"),
    "new nodes": (_SHAPE, "find", backward_graph, "if len(set(nodes)) != len(nodes):", "if False:"),
    "hooks": (gradient_graph.Cut, "fits", gradient_graph,
              "if nodes[place].variable._backward_hooks:", "if False:"),
    "packed twigs": (gradient_graph.Cut, "fits", gradient_graph,
                     "if is_packed(nodes[place]) is not answer:", "if False:"),
    "packed factors": (products.Product, "read", products,
                       "if getattr(node, raw_name).unpack_hook is not None:", "if False:"),
    "anchor": (CutMemory, "cut", cut_memory,
               "if known is not anchor:", "if False:"),
}


@pytest.mark.parametrize("check", _WEAKENED)
def test_each_check_is_missed(check, monkeypatch):
    owner, name, module, old, new = _WEAKENED[check]
    monkeypatch.setattr(owner, name, _weakened(getattr(owner, name), module, old, new))
    assert any(_num_wrong(range(first, first + 10))[0] for first in range(0, SEEDS, 10))
