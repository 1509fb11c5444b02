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
from functools import cache
from typing import NamedTuple

from torch.autograd.function import BackwardCFunction

from rrfp.backward_graph import LEAF
from rrfp.products import Product, product_class

# Twigs that save no tensors, so that nobody can have packed them.
_PLAIN_TWIGS = frozenset(
    (LEAF, "TBackward0", "TransposeBackward0", "ToCopyBackward0", "ViewBackward0",
     "ExpandBackward0", "PermuteBackward0", "ReshapeAliasBackward0")
)
PACKED = "its saved tensors are packed (activation checkpointing or saved-tensor hooks)"
COMPILED = "torch.compile made its backward one piece"
REENTRANT = "it recomputes with reentrant checkpointing"
SHARDED = "fully_shard reduces its gradients at the end of each backward"
HOOKED = "a parameter outside matrix products and convolutions has a gradient hook"
NO_PRODUCT = "no parameter is used by matrix products or convolutions alone"
NO_PARAMETER = "it has no parameter that requires grad"


class PutOff(NamedTuple):
    """A trunk node that computes some of its gradients in W.

    Attributes:
        place: Its own.
        product: The ``Product`` that computes them.
        edges: The numbers of their edges in the order of the walk.
        leaves: Of each, the place of the leaf that takes this gradient and no other, else None.
        groups: Of each that has no such leaf, the number of the group that must reach its leaves
            together, else None.
        transposed: Of each, whether that leaf takes the transpose.
    """

    place: int
    product: Product
    edges: tuple
    leaves: tuple
    groups: tuple
    transposed: tuple


@dataclass
class Cut:
    """How to run graphs of one shape in two halves; nodes are named by their places.

    It is sound for a graph of that shape while each put-off product can be read, no kept leaf has
    a gradient hook, and ``packed`` is as it was.

    Attributes:
        fused_because: Why it must run in one, else None; nothing is put off then.
        put_off: ``PutOff`` of each product that is.
        kept: Leaves whose gradients are computed with the input gradients and kept. Of a fused
            graph: all its leaves if they could be kept, else none.
        packed: Whose saved tensors were looked at, how, and whether they were packed:
            ``[(place, is_packed(node), answer)]``. Reading a product looks at what it needs.
        is_lasting: Whether it follows from the shape and what is said above alone.
        has_foreign: Whether code that is not torch's computes gradients there (custom functions),
            and may write to those it gets.
    """

    fused_because: str | None = None
    put_off: tuple = ()
    kept: tuple = ()
    packed: tuple = ()
    is_lasting: bool = True
    has_foreign: bool = True

    def fits(self, nodes):
        """Whether the cut is sound for these nodes, but for what reading the products shows."""
        for place in self.kept:
            if nodes[place].variable._backward_hooks:
                return False
        for place, is_packed, answer in self.packed:
            if is_packed(nodes[place]) is not answer:
                return False
        return True


def places_of_products(graph):
    """Of the nodes whose weight gradients can be products of their own."""
    return [place for place, node in enumerate(graph.nodes) if product_class(node) is not None]


def find_cut(graph, ends):
    """The cut of a graph whose trunk leads from the outputs to the places ``ends``: the leaf
    behind which the received inputs are, or nodes of products.

    Reads the graph and changes nothing. Cost: a few microseconds per node.
    """
    names = set(graph.names)
    if any(name.startswith("Checkpoint") for name in names):
        return Cut(fused_because=REENTRANT)
    # A weight gradient added later would miss that reduction, without a sign.
    if any(name.startswith("RegisterPostBackwardFunction") for name in names):
        return Cut(fused_because=SHARDED)
    trunk = set().union(*map(graph.above, ends))
    twigs = _Twigs(graph, trunk)
    packed = tuple(twigs.packed)
    kept = tuple(place for place in sorted(twigs.kept) if graph.names[place] == LEAF)
    if any(graph.nodes[place].variable._backward_hooks for place in kept):
        return Cut(fused_because=HOOKED, is_lasting=False)
    if twigs.put_off:
        read = {put_off.place for put_off in twigs.put_off if put_off.product.saved}
        packed = tuple(item for item in packed if item[0] not in read)
        foreign = _has_foreign(graph, ends)
        return Cut(put_off=tuple(twigs.put_off), kept=kept, packed=packed, has_foreign=foreign)
    if not kept:
        return Cut(fused_because=NO_PARAMETER)
    if any(answer for _, _, answer in packed):
        return Cut(fused_because=PACKED, kept=kept, packed=packed)
    because = NO_PRODUCT
    if any(is_packed(graph.nodes[place]) for place in trunk):
        because = PACKED
    elif any(name.startswith("CompiledFunction") for name in names):
        because = COMPILED
    return Cut(fused_because=because, kept=kept, is_lasting=False)


def _has_foreign(graph, ends):
    anchors = {place for place in ends if graph.names[place] == LEAF}
    for place, node in enumerate(graph.nodes):
        # Those of C++ have no names of their own; what leads to the anchor is rrfp's.
        is_custom = isinstance(node, BackwardCFunction) or graph.names[place] == "CppFunction"
        if is_custom and set(graph.children[place]) - {*anchors, None}:
            return True
    return False


class _Twigs:
    """Which twigs are put off and which are kept."""

    def __init__(self, graph, trunk):
        self.graph = graph
        self.trunk = trunk
        self.packed = []  # as of a Cut
        self.kept = set()
        self._products = {}  # place in the trunk -> class of its product, None if it has none
        unsound = [place for place in range(graph.num_starts) if place not in trunk]
        for twig, parents in enumerate(graph.parents):
            if twig in trunk:
                continue
            num_cuts = 0
            for place, index in parents:
                if place in trunk:
                    num_cuts += 1
                    if not self._can_put_off(place, index, twig):
                        unsound.append(twig)
            # The order in which three or more gradients are added would change.
            if 0 < num_cuts < len(parents) and len(parents) > 2:
                unsound.append(twig)
            if graph.names[twig] not in _PLAIN_TWIGS and self._is_packed(twig, is_packed):
                unsound.append(twig)
        self._keep(unsound)
        group_of = self._groups()
        self.put_off = []
        for place, product in self._products.items():
            indices = tuple(
                index for index, twig in enumerate(graph.children[place]) if twig in group_of
            )
            if product is not None and indices:
                twigs = [graph.children[place][index] for index in indices]
                leaves, transposed = zip(*map(self._sole_leaf, twigs))
                self.put_off.append(PutOff(
                    place,
                    product(indices, graph.names[twigs[0]] == LEAF),
                    tuple(graph.first_edges[place] + index for index in indices),
                    leaves,
                    tuple(group_of[twig] if leaf is None else None
                          for twig, leaf in zip(twigs, leaves)),
                    transposed,
                ))

    def _can_put_off(self, place, index, twig):
        node = self.graph.nodes[place]
        if place not in self._products:
            product = product_class(node)
            if product is not None and self._is_packed(place, product.is_packed):
                product = None
            self._products[place] = product
        product = self._products[place]
        if product is None or not product.can_reach(index, self.graph.nodes[twig]):
            return False
        edge = self.graph.edges[self.graph.first_edges[place] + index]
        return product((index,)).read(node, edge) is not None

    def _is_packed(self, place, ask):
        answer = ask(self.graph.nodes[place])
        self.packed.append((place, ask, answer))
        return answer

    def _neighbours(self, twig):
        for child in self.graph.children[twig]:
            if child is not None:
                yield child
        for parent, _ in self.graph.parents[twig]:
            if parent not in self.trunk:
                yield parent

    def _keep(self, unsound):
        """Keep the unsound twigs and all that hang together with them."""
        kept = self.kept
        while unsound:
            twig = unsound.pop()
            if twig in kept:
                continue
            kept.add(twig)
            unsound.extend(self._neighbours(twig))
            for place, _ in self.graph.parents[twig]:
                product = self._products.get(place)
                if product is not None and product.is_joint:
                    unsound.extend(
                        child for child in self.graph.children[place]
                        if child is not None and child not in self.trunk
                    )

    def _groups(self):
        """By twig that is put off, the number of its group."""
        group_of = {}
        for start in range(len(self.graph.nodes)):
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

    def _sole_leaf(self, twig):
        """(the leaf that takes the gradient of this twig alone or None, if transposed)."""
        graph = self.graph
        leaf, is_transposed = twig, False
        if graph.names[twig] == "TBackward0" and len(graph.parents[twig]) == 1:
            leaf, is_transposed = graph.children[twig][0], True
        if leaf is None or graph.names[leaf] != LEAF or len(graph.parents[leaf]) != 1:
            return None, False
        return leaf, is_transposed


def is_packed(node):
    """Whether somebody's hooks have packed a tensor that the node saved."""
    if isinstance(node, BackwardCFunction):
        return any(saved.unpack_hook is not None for saved in node._raw_saved_tensors)
    for name in _raw_saved_names(type(node)):
        saved = getattr(node, name)
        for one in saved if isinstance(saved, (tuple, list)) else (saved,):
            if one.unpack_hook is not None:
                return True
    return False


@cache
def _raw_saved_names(kind):
    return [name for name in dir(kind) if name.startswith("_raw_saved_")]
