"""A stage's backward in two halves: I, the gradients it must send, and W, those it keeps.

``run_input_half`` runs I and returns what W has to do. Each piece of work is done once, nothing
stays alive for W but the factors of the products that are put off, and hooks fire once: those of
tensors at I, those of parameters when their gradient is complete, at W. Hooks that are set on
graph nodes themselves (``tensor.grad_fn.register_hook``) see at I the gradients of I alone.

Where a graph has nothing to put off, or cannot be run in halves, it is *fused*: I is the whole
backward, W does nothing, and ``fused_because`` says why. Where no input takes a gradient it is
the other way round: nobody waits for I, so W is the whole.
"""

import torch
from torch.autograd.graph import GradientEdge

from rrfp.backward_pass import run_backward
from rrfp.gradient_graph import NO_PARAMETER, edge_node, find_cut
from rrfp.storage import storage_address

# W hands gradients to the parameters whenever it has computed this much.
_BATCH_BYTES = 64 << 20


class WeightHalf:
    """What is left for W; this one: nothing.

    Attributes:
        fused_because: Why I was the whole backward; None if it was not.
    """

    def __init__(self, fused_because=None):
        self.fused_because = fused_because

    def run(self):
        """Add the gradients of the parameters to their ``.grad``; once."""

    def shares_memory(self, tensor):
        """Whether W still reads the tensor's memory, so that others must not write to it."""
        return False


class _Whole(WeightHalf):
    """No input takes a gradient: W is the whole backward."""

    def __init__(self, roots, gradients):
        super().__init__()
        self._roots, self._gradients = roots, gradients

    def run(self):
        run_backward(self._roots, self._gradients)
        self._roots = self._gradients = ()


class _Pieces(WeightHalf):
    """The products put off, and the gradients that I has kept."""

    def __init__(self, fused_because):
        super().__init__(fused_because)
        self._waiting = []  # (product, edge indices, twig edges, group, gradient, versions)
        self._kept = []  # (edge of the leaf, gradient)

    def watch(self, node, product, indices, group_of):
        """Take the gradient of the node's output when I comes to it."""
        edges = [GradientEdge(*node.next_functions[index]) for index in indices]
        groups = [group_of[edge.node] for edge in edges]
        product.read(indices)

        def take(gradients):
            gradient = gradients[0]
            if gradient is not None:
                held = (gradient, *(t for tensors in product.saved.values() for t in tensors))
                versions = [(tensor, tensor._version) for tensor in held]
                self._waiting.append((product, indices, edges, groups, gradient, versions))

        node.register_prehook(take)

    def keep(self, leaf, gradient):
        if gradient is not None:
            self._kept.append((GradientEdge(leaf, 0), gradient))

    def run(self):
        last_use = {}
        for place, (_, _, _, groups, _, _) in enumerate(self._waiting):
            for group in groups:
                last_use[group] = place
        open_groups = {}  # group -> ([edge], [gradient]) until its last product is there
        edges, gradients, num_bytes = [], [], 0
        self._waiting.reverse()
        for place in range(len(self._waiting)):
            product, indices, twigs, groups, gradient, versions = self._waiting.pop()
            _check_versions(versions)
            found = product.gradients(gradient, indices)
            del product, gradient, versions
            for twig, group, value in zip(twigs, groups, found):
                of_group = open_groups.setdefault(group, ([], []))
                of_group[0].append(twig)
                of_group[1].append(value)
            del found, value
            for group in dict.fromkeys(groups):
                if last_use[group] == place:
                    more_edges, more = open_groups.pop(group)
                    edges += more_edges
                    gradients += more
                    num_bytes += sum(tensor.nbytes for tensor in more)
                    del more
            if num_bytes >= _BATCH_BYTES:
                run_backward(edges, gradients)
                edges, gradients, num_bytes = [], [], 0
        for edge, gradient in self._kept:
            edges.append(edge)
            gradients.append(gradient)
        self._kept = []
        if edges:
            run_backward(edges, gradients)

    def shares_memory(self, tensor):
        address = storage_address(tensor)
        return address != 0 and (
            any(
                storage_address(held) == address
                for (_, _, _, _, _, versions) in self._waiting
                for held, _ in versions
            )
            or any(storage_address(kept) == address for _, kept in self._kept)
        )


def _check_versions(versions):
    for tensor, version in versions:
        if tensor._version != version:
            raise RuntimeError(
                f"a tensor of shape {tuple(tensor.shape)} that the weight gradients need was "
                f"changed in place between the input gradient and the weight gradient (version "
                f"{tensor._version}, expected {version}). Do not change saved tensors or "
                "gradients in place, or pass split_backward=False."
            )


def run_input_half(roots, gradients, anchor, in_order=False):
    """Run I and return the ``WeightHalf`` for W.

    Args:
        roots: Outputs of the stage that take a gradient.
        gradients: One for each root, none of them None.
        anchor: The leaf behind the stage's received inputs; None when they take no gradient.
        in_order: No parameter gradient may be added before W, not even of a fused graph.

    Raises:
        RuntimeError: ``in_order``, and the graph can neither be split nor kept.
        What hooks, custom functions and torch's autograd raise.
    """
    if not roots:
        return WeightHalf()
    cut = None if anchor is None else find_cut(roots, anchor)
    if cut is None:
        return _Whole(roots, gradients)
    if cut.fused_because is not None and not (in_order and cut.kept):
        if in_order and cut.fused_because != NO_PARAMETER:
            raise RuntimeError(
                f"the backward of this stage could be split in earlier steps and now it cannot: "
                f"{cut.fused_because}. A deterministic step needs to know that beforehand; build "
                "a new Pipeline after such a change."
            )
        run_backward(roots, gradients)
        return WeightHalf(cut.fused_because)
    pieces = _Pieces(cut.fused_because)
    for node, product, indices in cut.products:
        pieces.watch(node, product, indices, cut.group_of)
    targets = [GradientEdge(edge_node(anchor), 0)] + [GradientEdge(leaf, 0) for leaf in cut.kept]
    found = torch.autograd.grad(roots, targets, gradients, allow_unused=True)
    for leaf, gradient in zip(cut.kept, found[1:]):
        pieces.keep(leaf, gradient)
    return pieces
