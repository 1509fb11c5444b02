"""Adding gradients to parameters without a pass of autograd's engine.

The engine takes several times as long per parameter as the addition itself. What it does besides
is to run hooks, so gradients are added directly only where nothing but Python could have set
one, and Python has not: every hook that Python sets takes a number from one counter
(``RemovableHandle``), and while that stands still since a parameter was found without hooks, it
has none.
"""

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils.hooks import RemovableHandle

from rrfp.backward_graph import LEAF
from rrfp.backward_pass import run_backward

_PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter)
_TORCHS = vars(torch.autograd.graph)  # what register_multi_grad_hook's own functions are made in


class HookWatch:
    """Which leaves of the graph surely have no hooks; for one thread.

    Hooks that C++ sets on a leaf's node are not seen (``DistributedDataParallel`` sets some; as a
    stage it is refused).

    Attributes:
        free: The ids of parameters without hooks, as of the last ``look()``. One that takes such
            an id over has none either.
        num_changes: How many looks found that hooks had been set.
    """

    def __init__(self):
        self._counted = RemovableHandle.next_id
        self.free = set()
        self.num_changes = 0

    def look(self):
        """Forget what is known if a hook was set anywhere since the last look."""
        if RemovableHandle.next_id != self._counted:
            self._counted = RemovableHandle.next_id
            self.num_changes += 1
            self.free.clear()

    def count_own(self, number):
        """So many hooks set since the last look are no leaf's; those of other threads stay seen."""
        self._counted += number

    def is_free(self, leaf, variable):
        """Whether a leaf's node and its variable have no hooks, now; then it is ``free``.

        Needs a ``look()`` before.
        """
        if type(variable) not in _PLAIN_TENSORS:
            return False
        if variable._backward_hooks or variable._post_accumulate_grad_hooks:
            return False
        # All hooks of a kind on one node share a dictionary, which a new handle shows.
        for register in (leaf.register_prehook, leaf.register_hook):
            handle = register(_no_hook)
            self.count_own(1)
            hooks = handle.hooks_dict_ref()
            handle.remove()
            if hooks:
                return False
        self.free.add(id(variable))
        return True


def _no_hook(*_):
    """Is never called."""


class Additions:
    """Gradients on their way to the ``.grad`` of parameters.

    With a ``HookWatch`` those that can be are added without the engine, all in one call; the
    engine gets the others: with hooks, without a ``.grad`` yet, of special types, of another
    dtype, device or shape.

    ``has_free_twigs``: no node between a product and its leaf can have a hook.
    """

    def __init__(self, watch, has_free_twigs):
        self._watch = watch
        self._has_free_twigs = has_free_twigs
        # (leaf, gradient, edge, whether it is transposed): of leaves that nothing else adds to;
        # through the graph the gradient comes by the edge, and there it is the transpose if so.
        self.to_leaves = []
        self._groups = []  # [(edges, gradients)], each for one pass

    def total_of(self, leaf, is_transposed):
        """The ``.grad`` that a leaf's gradient may be added to at once; None: ``run`` adds it.

        It is a plain, strided tensor.
        """
        if self._watch is None:
            return None
        self._watch.look()
        return self._total_of(leaf, is_transposed)

    def _total_of(self, leaf, is_transposed):
        if is_transposed and not self._has_free_twigs:
            return None  # hooks of the transpose do not show on the node
        variable = leaf.variable
        total = variable.grad
        if (
            type(total) is torch.Tensor
            and total.layout is torch.strided
            and variable.requires_grad
            and not (total.is_neg() or total.is_conj())  # lazy bits, which other tensors may lack
            and (id(variable) in self._watch.free or self._watch.is_free(leaf, variable))
        ):
            return total
        return None

    def through_graph(self, edges, gradients):
        self._groups.append((edges, gradients))

    def run(self, is_last=True):
        """Add all that came since the last time. Needs ``no_grad``.

        Unless it ``is_last``, what hooks of several tensors take waits for the next time: such a
        hook fires in every pass of the engine, with the gradients of that pass.
        """
        rest, groups = self.to_leaves, self._groups
        self.to_leaves, self._groups = [], []
        if not is_last:
            self.to_leaves, rest = _parted(rest, lambda item: _has_joint_hook(item[0]))
            self._groups, groups = _parted(
                groups, lambda group: any(_has_joint_hook(edge.node) for edge in group[0])
            )
        if self._watch is not None:
            self._watch.look()
            rest = self._add_directly(rest)
        edges = [edge for of_group, _ in groups for edge in of_group]
        gradients = [gradient for _, of_group in groups for gradient in of_group]
        for _, gradient, edge, is_transposed in rest:
            edges.append(GradientEdge(*edge))
            gradients.append(gradient.t() if is_transposed else gradient)
        if len(edges) == 1:
            # Hooks of several tensors (register_multi_grad_hook) do not fire for a node where a
            # pass of the engine begins alone.
            company = torch.zeros((), device="cpu", requires_grad=True)
            edges.append(get_gradient_edge(company))
            gradients.append(company.detach())
        if edges:
            run_backward(edges, gradients)

    def _add_directly(self, items):
        """Add what can be added without the engine; returns the rest."""
        rest, sums, values = [], [], []
        for item in items:
            leaf, gradient, _, is_transposed = item
            total = self._total_of(leaf, is_transposed)
            if (
                total is not None
                and type(gradient) is torch.Tensor
                and total.dtype is gradient.dtype
                and gradient.layout is torch.strided
                and total.shape == gradient.shape
                and not (gradient.is_neg() or gradient.is_conj())
            ):
                sums.append(total)
                values.append(gradient)
            else:
                rest.append(item)
        if not sums:
            return rest
        # On a GPU the additions run side by side.
        if sums[0].is_cpu or len({total.data_ptr() for total in sums}) == len(sums):
            torch._foreach_add_(sums, values)
        else:
            for total, gradient in zip(sums, values):
                total.add_(gradient)
        return rest


def _has_joint_hook(node):
    """Whether a leaf at or behind a node has a hook of several tensors, one that torch made."""
    seen, stack = {node}, [node]
    while stack:
        node = stack.pop()
        hooks = node.variable._backward_hooks if type(node).__name__ == LEAF else None
        if hooks and any(getattr(hook, "__globals__", None) is _TORCHS for hook in hooks.values()):
            return True
        for child, _ in node.next_functions:
            if child is not None and child not in seen:
                seen.add(child)
                stack.append(child)
    return False


def _parted(items, holds):
    """(the items for which it holds, the others)."""
    parts = [], []
    for item in items:
        parts[not holds(item)].append(item)
    return parts
