"""``run_backward`` does what ``torch.autograd.backward`` does, in every case that stages have.

Would catch: a root whose class has a backward of its own passed by, gradients lost with several
roots, hooks that do not fire, an error of torch's that no longer comes.
"""

import pytest
import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from rrfp.backward_pass import run_backward


class Recorded(torch.Tensor):
    """A tensor class that has its own say in whatever is done to it."""

    seen = ()

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        cls.seen = (*cls.seen, function)
        return super().__torch_function__(function, types, args, kwargs or {})


def graph():
    """(leaves, roots, gradients): two roots over one parameter, with hooks."""
    torch.manual_seed(7)
    weight = nn.Parameter(torch.randn(3, 3, dtype=torch.float64))
    value = torch.randn(3, dtype=torch.float64, requires_grad=True)
    hidden = weight @ value
    hidden.register_hook(lambda gradient: 2 * gradient)
    roots = [hidden.tanh(), (hidden * value).sum()]
    return (weight, value), roots, [torch.randn(3, dtype=torch.float64), torch.tensor(0.5).double()]


@pytest.mark.parametrize("as_edges", [False, True])
def test_gradients_are_those_of_torch(as_edges):
    expected, roots, gradients = graph()
    torch.autograd.backward(roots, gradients)
    leaves, roots, gradients = graph()
    run_backward([get_gradient_edge(r) for r in roots] if as_edges else roots, gradients)
    for got, wanted in zip(leaves, expected, strict=True):
        assert torch.equal(got.grad, wanted.grad)


def test_a_parameter_may_be_a_root_itself():
    weight = nn.Parameter(torch.ones(2))
    run_backward([weight], [torch.full((2,), 3.0)])
    assert weight.grad.tolist() == [3.0, 3.0]


def test_classes_with_a_backward_of_their_own_keep_it():
    root = torch.ones(2, requires_grad=True).as_subclass(Recorded) * 2
    Recorded.seen = ()
    run_backward([root], [torch.ones(2)])
    assert torch.autograd.backward in Recorded.seen


def test_a_gradient_of_another_shape_is_refused():
    _, (root, _), _ = graph()
    with pytest.raises(RuntimeError, match="shape"):
        run_backward([root], [torch.ones(5, dtype=torch.float64)])


def test_a_graph_runs_once():
    _, roots, gradients = graph()
    run_backward(roots, gradients)
    with pytest.raises(RuntimeError, match="second time"):
        run_backward(roots, gradients)
