"""Where the backward graph of one forward can be cut into input and weight gradients.

Nodes on a path from the outputs to the received inputs are the *trunk*; the others lead to
parameters alone and are *twigs*. An edge from the trunk to a twig can be put off where the trunk
node is a matrix product or a convolution: each of its gradients is a product of its own, so
nothing is computed twice (``products.py``). Every other trunk node runs once, whole, with the
input gradients; what it yields for parameters is kept until W.

A parameter is either put off or kept, never half of each: so twigs that hang together share
their fate.
"""

from dataclasses import dataclass

import torch
from torch.autograd.graph import get_gradient_edge

from rrfp.products import product_at

_LEAF = "AccumulateGrad"
# Twigs that save no tensors, so that nobody can have packed them.
_PLAIN_TWIGS = frozenset(
    (_LEAF, "TBackward0", "TransposeBackward0", "ToCopyBackward0", "ViewBackward0",
     "ExpandBackward0", "PermuteBackward0", "ReshapeAliasBackward0")
)
PACKED = "its saved tensors are packed (activation checkpointing or saved-tensor hooks)"
COMPILED = "torch.compile made its backward one piece"
REENTRANT = "it recomputes with reentrant checkpointing"
SHARDED = "fully_shard reduces its gradients at the end of each backward"
HOOKED = "a parameter outside matrix products and convolutions has a gradient hook"
NO_PRODUCT = "no parameter is used by matrix products or convolutions alone"
NO_PARAMETER = "it has no parameter that requires grad"


@dataclass
class Cut:
    """How to run one graph in two halves.

    Attributes:
        fused_because: Why it must run in one, else None; there are no products then.
        products: The trunk nodes that are put off, each with its product and twig edges,
            ``[(node, product, [edge index])]``.
        kept: Leaves whose gradients are computed with the input gradients and kept. Of a fused
            graph: all its leaves if they could be kept, else none.
        group_of: By twig, the number of the group that must reach its leaves together.
    """

    fused_because: str | None = None
    products: tuple = ()
    kept: tuple = ()
    group_of: dict | None = None


class _Graph:
    """Nodes reachable from the outputs; ``parents[child]`` lists (parent, edge index)."""

    def __init__(self, starts):
        self.parents = {start: [] for start in starts}
        self.children = {}
        stack = list(self.parents)
        parents, children = self.parents, self.children
        while stack:
            node = stack.pop()
            children[node] = edges = node.next_functions
            for index, (child, _) in enumerate(edges):
                if child is None:
                    continue
                if child not in parents:
                    parents[child] = []
                    stack.append(child)
                parents[child].append((node, index))

    def above(self, node):
        """Every node on a path from the outputs to ``node``, itself included."""
        found = {node}
        stack = [node]
        while stack:
            for parent, _ in self.parents[stack.pop()]:
                if parent not in found:
                    found.add(parent)
                    stack.append(parent)
        return found


def edge_node(tensor):
    """The node that takes the gradient of a tensor."""
    return tensor.grad_fn if tensor.grad_fn is not None else get_gradient_edge(tensor).node


def find_cut(roots, anchor):
    """The cut of the graph of ``roots``, or None when no root depends on ``anchor``.

    Reads the graph and changes nothing. Cost: a few microseconds per node.
    """
    anchor_node = edge_node(anchor)
    starts = [edge_node(root) for root in roots]
    graph = _Graph(starts)
    if anchor_node not in graph.parents:
        return None
    trunk = graph.above(anchor_node)
    names = {type(node).__name__ for node in graph.parents}
    if any(name.startswith("Checkpoint") for name in names):
        return Cut(fused_because=REENTRANT)
    # A weight gradient added later would miss that reduction, without a sign.
    if any(name.startswith("RegisterPostBackwardFunction") for name in names):
        return Cut(fused_because=SHARDED)
    twigs = _Twigs(graph, trunk, starts)
    kept = tuple(node for node in twigs.kept if type(node).__name__ == _LEAF)
    if any(node.variable._backward_hooks for node in kept):
        return Cut(fused_because=HOOKED)
    if not twigs.products:
        if not kept:
            return Cut(fused_because=NO_PARAMETER)
        if twigs.is_packed or any(_is_packed(node) for node in trunk):
            return Cut(fused_because=PACKED, kept=kept)
        is_compiled = any(name.startswith("CompiledFunction") for name in names)
        return Cut(fused_because=COMPILED if is_compiled else NO_PRODUCT, kept=kept)
    return Cut(products=tuple(twigs.products), kept=kept, group_of=twigs.groups())


class _Twigs:
    """Which twigs are put off and which are kept."""

    def __init__(self, graph, trunk, starts):
        self.graph = graph
        self.trunk = trunk
        self.is_packed = False
        self.kept = set()
        products = {}  # trunk node -> its product, None where it cannot be put off
        unsound = [start for start in starts if start not in trunk]
        for twig, parents in graph.parents.items():
            if twig in trunk:
                continue
            num_cuts = 0
            for node, index in parents:
                if node not in trunk:
                    continue
                if node not in products:
                    products[node] = self._product(node)
                product = products[node]
                num_cuts += 1
                if product is None or not product.covers(index, twig):
                    unsound.append(twig)
            # The order in which three or more gradients are added would change.
            if 0 < num_cuts < len(parents) and len(parents) > 2:
                unsound.append(twig)
            if type(twig).__name__ not in _PLAIN_TWIGS and _is_packed(twig):
                self.is_packed = True
                unsound.append(twig)
        self._keep(unsound, products)
        self.products = []
        for node, product in products.items():
            if product is None:
                continue
            indices = [
                index for index, (child, _) in enumerate(graph.children[node])
                if child is not None and child not in trunk and child not in self.kept
            ]
            if indices:
                self.products.append((node, product, indices))

    def _product(self, node):
        product = product_at(node)
        if product is not None and product.is_packed:
            self.is_packed = True
            return None
        return product

    def _neighbours(self, twig):
        for child, _ in self.graph.children[twig]:
            if child is not None:
                yield child
        for parent, _ in self.graph.parents[twig]:
            if parent not in self.trunk:
                yield parent

    def _keep(self, unsound, products):
        """Keep the unsound twigs and all that hang together with them."""
        kept = self.kept
        while unsound:
            twig = unsound.pop()
            if twig in kept:
                continue
            kept.add(twig)
            unsound.extend(self._neighbours(twig))
            for node, _ in self.graph.parents[twig]:
                product = products.get(node)
                if product is not None and product.is_joint:
                    unsound.extend(
                        child for child, _ in self.graph.children[node]
                        if child is not None and child not in self.trunk
                    )

    def groups(self):
        group_of = {}
        for start in self.graph.parents:
            if start in self.trunk or start in self.kept or start in group_of:
                continue
            number = len(group_of)
            group_of[start] = number
            stack = [start]
            while stack:
                for other in self._neighbours(stack.pop()):
                    if other not in group_of:
                        group_of[other] = number
                        stack.append(other)
        return group_of


def _is_packed(node):
    """Whether somebody's hooks have packed a tensor that the node saved."""
    if isinstance(node, torch.autograd.function.BackwardCFunction):
        return any(saved.unpack_hook is not None for saved in node._raw_saved_tensors)
    for name in dir(node):
        if name.startswith("_raw_saved_"):
            saved = getattr(node, name)
            for one in saved if isinstance(saved, (tuple, list)) else (saved,):
                if one.unpack_hook is not None:
                    return True
    return False
