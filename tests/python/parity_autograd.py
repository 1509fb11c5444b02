"""More scenarios (see parity_scenarios.py): graphs and gradients that are not the usual ones."""

import time

import torch
from parity_scenarios import W, plain, scenario
from torch.utils.checkpoint import checkpoint


def unused_parameters(seed):
    """Gradient stays None where the plain loop leaves None."""
    return scenario([lambda s, x: s.lin(x), lambda s, x: x * s.vec, lambda s, x: s.lin(x)], seed)


def skipped_branch(seed):
    """For odd microbatches an output is never used: its gradient is None, and must arrive."""

    def two(self, x, m):
        return self.lin(x), x * self.vec, m

    def maybe(self, a, b, m):
        return (plain(self, a) + b if m % 2 == 0 else plain(self, a)), m

    def only_even(self, h, m):
        return self.lin(h) if m % 2 == 0 else h * self.vec

    return scenario([two, maybe, only_even], seed, numbered=True)


def never_used_output(seed):
    """The next stage uses nothing of what it got: no gradient at all flows back."""

    def forget(self, x):
        return plain(self, torch.ones(3, W, dtype=torch.float64))

    return scenario([plain, forget, plain], seed)


def output_used_by_nobody(seed):
    """One of two outputs is ignored in every microbatch: what made it keeps gradient None."""
    return scenario(
        [
            lambda s, x: (s.lin(x), x * s.vec),
            lambda s, a, b: (plain(s, a), b),
            lambda s, a, b: plain(s, a),
        ],
        seed,
    )


def gradient_that_is_shared(seed):
    """Input and parameter of equal size have one gradient; a parameter may take it over as its
    ``.grad`` and add to it while it is still on its way to the stage before, which is slow."""

    def slow(self, x):
        hidden = self.lin(x) * self.vec
        hidden.register_hook(lambda gradient: time.sleep(0.002))
        return hidden

    def add(self, x):
        return x + self.rows.view(3, W)

    built = scenario([slow, add, plain], seed, count=8)
    built.stages[1].rows = torch.nn.Parameter(torch.ones(3 * W, dtype=torch.float64))
    return built


def in_place_first_layer(seed):
    """A stage that writes into what arrived, as nn.ReLU(inplace=True) does."""

    def writes(self, x):
        return self.lin(x.mul_(2).relu_())

    return scenario([lambda s, x: s.lin(x), writes, writes], seed)


def frozen(seed, which):
    result = scenario([plain, plain, plain], seed)
    for index in which:
        result.stages[index].requires_grad_(False)
    return result


def frozen_middle(seed):
    return frozen(seed, [1])


def frozen_first(seed):
    """Nothing before the last stage needs a gradient."""
    return frozen(seed, [0, 1])


def frozen_last(seed):
    return frozen(seed, [2])


def mixed_requires_grad(seed):
    """Whether an output needs a gradient differs by microbatch."""

    def maybe(self, x, m):
        hidden = plain(self, x)
        return (hidden if m % 2 else hidden.detach()), m

    return scenario(
        [maybe, lambda s, x, m: (plain(s, x), m), lambda s, x, m: plain(s, x)], seed, numbered=True
    )


def returns_its_input(seed):
    """Identity stages, at the start and in the middle, and one output given twice."""

    def twice(self, x):
        return x, x

    return scenario(
        [lambda s, x: x, lambda s, x: plain(s, x), twice, lambda s, a, b: plain(s, a) + b * 2], seed
    )


def returns_a_parameter(seed):
    return scenario([lambda s, x: (x, s.vec), lambda s, x, v: plain(s, x) * v, plain], seed)


def recomputed(seed):
    """Activation checkpointing inside the stages."""

    def wrapped(self, x):
        return checkpoint(lambda h: plain(self, h), x, use_reentrant=False)

    return scenario([wrapped, wrapped, wrapped], seed)


def saved_output(seed):
    """Outputs whose own backward needs their values (exp, sigmoid): nobody may touch them."""
    return scenario(
        [
            lambda s, x: s.lin(x).sigmoid(),
            lambda s, x: (s.lin(x) * 0.1).exp(),
            lambda s, x: s.lin(x).softmax(-1),
        ],
        seed,
    )


def hooks(seed):
    """Tensor and module hooks of the user fire, once per microbatch."""
    built = scenario([plain, plain, plain], seed)
    for stage in built.stages:
        stage.lin.register_full_backward_hook(
            lambda m, gi, go: (gi[0] * 2 if gi[0] is not None else None,)
        )
        stage.vec.register_hook(lambda g: g * 3)
    return built


_ALL = [
    unused_parameters, skipped_branch, never_used_output, output_used_by_nobody,
    gradient_that_is_shared, in_place_first_layer, frozen_middle, frozen_first, frozen_last,
    mixed_requires_grad, returns_its_input, returns_a_parameter, recomputed, saved_output, hooks,
]  # fmt: skip
SCENARIOS = {function.__name__: function for function in _ALL}
