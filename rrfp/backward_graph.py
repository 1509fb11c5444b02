"""The graph behind the outputs of one forward, and its shape, which outlives it.

Most microbatches of a stage have graphs of one shape: the same kinds of nodes, joined alike.
``GraphShape`` knows that without a tensor or a node, and tells in one walk whether a new graph
has it. Nodes are named by their *place*, their number in the order of that walk.
"""

import weakref
from operator import itemgetter

from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import get_gradient_edge

LEAF = "AccumulateGrad"
_node_of = itemgetter(0)


def edge_node(tensor):
    """The node that takes the gradient of a tensor."""
    return tensor.grad_fn if tensor.grad_fn is not None else get_gradient_edge(tensor).node


def first_nodes(roots):
    """The nodes where a walk begins, each once."""
    return list(dict.fromkeys([edge_node(root) for root in roots]))


class Graph:
    """Nodes reachable from the roots, by place.

    Attributes:
        nodes: All of them; the roots' come first.
        num_starts: How many these are.
        names: By place, the name of the node's kind.
        edges: All, as ``(node, number)``, in the order of the walk.
        first_edges: By place, the number of its first edge there.
        children: By place, where each edge leads; None where it leads nowhere.
        parents: By place, ``[(place of the parent, its edge)]``.
    """

    def __init__(self, roots):
        self.nodes = nodes = first_nodes(roots)
        self.num_starts = len(nodes)
        self.edges, self.first_edges = [], []
        self.children = children = []
        place_of = {node: place for place, node in enumerate(nodes)}
        for node in nodes:  # grows meanwhile
            places = []
            self.first_edges.append(len(self.edges))
            self.edges += node.next_functions
            for child, _ in node.next_functions:
                place = None
                if child is not None:
                    place = place_of.setdefault(child, len(nodes))
                    if place == len(nodes):
                        nodes.append(child)
                places.append(place)
            children.append(places)
        self.names = [type(node).__name__ for node in nodes]
        self.parents = [[] for _ in nodes]
        for parent, places in enumerate(children):
            for index, place in enumerate(places):
                if place is not None:
                    self.parents[place].append((parent, index))

    def place_of_leaf(self, tensor):
        """Where the gradient of a leaf ends; None if it is not reached."""
        for place, node in enumerate(self.nodes):
            if self.names[place] == LEAF and node.variable is tensor:
                return place
        return None

    def above(self, place):
        """Every place on a path from the roots to this one, itself included."""
        found = {place}
        stack = [place]
        while stack:
            for parent, _ in self.parents[stack.pop()]:
                if parent not in found:
                    found.add(parent)
                    stack.append(parent)
        return found


class GraphShape:
    """Kinds of nodes and where their edges lead; holds neither nodes nor tensors."""

    def __init__(self, graph):
        self._num_starts = graph.num_starts
        self._kinds = [type(node) for node in graph.nodes]
        # Classes of custom functions may be made anew, and hold anything: [(place, weakly)].
        self._functions = []
        for place, kind in enumerate(self._kinds):
            if issubclass(kind, BackwardCFunction):
                self._functions.append((place, weakref.ref(kind)))
                self._kinds[place] = None
        # Of each place but leaves, which have no edges: (place, number of edges, the first that
        # leads to a new node or None, the others that do).
        self._steps = []
        targets = []  # by edge, in the order of the walk; the number of nodes for nowhere
        num_seen = graph.num_starts
        for place, children in enumerate(graph.children):
            new = []
            for index, target in enumerate(children):
                if target == num_seen:
                    new.append(index)
                    num_seen += 1
                targets.append(len(graph.nodes) if target is None else target)
            if graph.names[place] != LEAF:
                self._steps.append((place, len(children), new[0] if new else None, new[1:]))
        self._targets_in = itemgetter(*targets, 0, 0)  # of at least two it makes a tuple

    def find(self, roots):
        """(nodes by place, edges) of the roots' graph, or None when it has another shape.

        Cost: less than half a microsecond per node.
        """
        nodes = first_nodes(roots)
        if len(nodes) != self._num_starts:
            return None
        edges = []
        for place, count, first, others in self._steps:
            node = nodes[place]
            if node is None:
                return None
            found = node.next_functions
            if len(found) != count:
                return None
            edges += found
            if first is not None:
                nodes.append(found[first][0])
                for index in others:
                    nodes.append(found[index][0])
        kinds = list(map(type, nodes))
        for place, function in self._functions:
            if kinds[place] is not function():
                return None
            kinds[place] = None
        if kinds != self._kinds:
            return None
        # What was new here must have been new there, and what was known must be the same.
        if len(set(nodes)) != len(nodes):
            return None
        nodes.append(None)
        if (*map(_node_of, edges), nodes[0], nodes[0]) != self._targets_in(nodes):
            return None
        nodes.pop()
        return nodes, edges
