"""Torch's backward pass, without what ``torch.autograd.backward`` does before it.

That looks at every gradient in Python, which takes longer than a short pass itself; the engine
checks shapes, dtypes and devices as well, and gradients between stages come from an engine.
"""

import torch
from torch.autograd.graph import GradientEdge, _engine_run_backward

# Other types may have a backward of their own (__torch_function__).
_PLAIN_ROOTS = frozenset((torch.Tensor, torch.nn.Parameter, GradientEdge))


def run_backward(roots, gradients):
    """As ``torch.autograd.backward``, of tensors or graph edges with a gradient for each.

    Raises:
        What hooks, custom functions and torch's engine raise.
    """
    for root in roots:
        if type(root) not in _PLAIN_ROOTS:
            return torch.autograd.backward(roots, gradients)
    _engine_run_backward(
        tuple(roots), tuple(gradients), False, False, (), allow_unreachable=True,
        accumulate_grad=True,
    )


def gradients_of(targets, roots, gradients):
    """As ``torch.autograd.grad`` of the roots, for leaves or graph edges; None where unreached.

    Raises:
        What hooks, custom functions and torch's engine raise.
    """
    for root in roots:
        if type(root) not in _PLAIN_ROOTS:
            return torch.autograd.grad(roots, targets, gradients, allow_unused=True)
    return _engine_run_backward(
        tuple(roots), tuple(gradients), False, False, tuple(targets), allow_unreachable=True,
        accumulate_grad=False,
    )
