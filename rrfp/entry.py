"""How tensors from other stages enter a stage's graph, and what gradients come out of there."""

import torch

from rrfp.boundary import gradients_parcel
from rrfp.storage import is_shared, settled, storage_address


class _Arrival(torch.autograd.Function):
    """Tensors from another stage enter this stage's graph; their gradients end in the box.

    Its outputs are neither leaves nor views, so that a stage may begin with an in-place layer.
    """

    @staticmethod
    def forward(ctx, anchor, box):
        ctx.set_materialize_grads(False)
        ctx.box = box
        tensors, box.tensors = box.tensors, ()
        return tensors

    @staticmethod
    def backward(ctx, *gradients):
        box = ctx.box
        if box.is_reached:
            # A stage that calls backward() in its forward comes here before its B.
            gradients = tuple(
                new if old is None else old if new is None else old + new
                for old, new in zip(box.gradients, gradients)
            )
        box.gradients, box.is_reached = gradients, True
        return None, None


# What Function.apply comes to outside functorch, whose transforms end at a stage's border.
_enter_graph = super(torch.autograd.Function, _Arrival).apply


class _Box:
    __slots__ = ("tensors", "gradients", "is_reached")

    def __init__(self, tensors):
        self.tensors = tensors
        self.gradients = (None,) * len(tensors)
        self.is_reached = False


def enter(parcel, anchor):
    """Make the parcel's leaves part of the graph of ``anchor``'s users.

    Returns the box of their gradients; None when none is due.
    """
    needs_grad, leaves = parcel.needs_grad, parcel.leaves
    if not needs_grad:
        return None
    box = _Box(tuple([leaves[index] for index in needs_grad]))
    for index, tensor in zip(needs_grad, _enter_graph(anchor, box)):
        leaves[index] = tensor
    return box


def own_gradients(boxes):
    """By source: a parcel of the captured gradients, each in memory of its own.

    Autograd may let a parameter, of the stage or of anything else that took part, keep the very
    memory of a gradient as its ``.grad``; the next backward would add to it while the gradient is
    still on its way. Two inputs may get one gradient, too, and W may still read it.
    """
    seen = set()  # one tensor for two inputs counts as one user of its memory
    parcels = []
    for box in boxes:
        own = []
        for gradient in () if box is None else box.gradients:
            if gradient is not None:
                gradient = settled(gradient)
                address = storage_address(gradient)
                if address in seen or is_shared(gradient):
                    gradient = gradient.clone()
                else:
                    seen.add(address)
            own.append(gradient)
        parcels.append(gradients_parcel(own))
    return parcels


def sum_of(gradients):
    """Of one tensor's gradients from its consumers, in their order; None where none has any."""
    total = None
    for gradient in gradients:
        total = gradient if total is None else total if gradient is None else total + gradient
    return total
