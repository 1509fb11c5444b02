"""What a stage knows of its backward graphs from one microbatch to the next."""

from typing import NamedTuple

from rrfp.backward_graph import Graph, GraphShape
from rrfp.gradient_graph import Cut, find_cut, places_of_products

# A stage may take different ways through its module; each has a shape of its own.
_MAX_SHAPES = 4


class CutGraph(NamedTuple):
    """A graph with its cut and what the products that are put off need.

    Attributes:
        nodes: By place.
        edges: ``(node, number)`` in the order of the walk.
        cut: The cut.
        factors: Of each product in ``cut.put_off``.
    """

    nodes: list
    edges: list
    cut: Cut
    factors: list


class CutMemory:
    """The cuts of the graphs that were seen last, by shape; neither nodes nor tensors."""

    def __init__(self):
        self._known = []  # [(GraphShape, place of the anchor, Cut)], the last used first

    def cut(self, roots, anchor):
        """The ``CutGraph`` of the roots, or None when none of them depends on ``anchor``.

        An anchor of None: only weight gradients are wanted. Then None says that no product has one.

        Reads the graph and changes nothing. Whatever a cut rests on is looked at anew for every
        graph.
        """
        for number, (shape, anchor_place, cut) in enumerate(self._known):
            found = shape.find(roots)
            if found is None:
                continue
            known = None if anchor_place is None else found[0][anchor_place].variable
            if known is not anchor:
                continue
            factors = _read(*found, cut) if cut.fits(found[0]) else None
            if factors is None:
                del self._known[number]
                break
            if number:
                self._known.insert(0, self._known.pop(number))
            return CutGraph(*found, cut, factors)
        graph = Graph(roots)
        anchor_place = None
        if anchor is None:
            ends = places_of_products(graph)
        else:
            anchor_place = graph.place_of_leaf(anchor)
            ends = [] if anchor_place is None else [anchor_place]
        if not ends:
            return None
        cut = find_cut(graph, ends)
        if cut.is_lasting:
            self._known.insert(0, (GraphShape(graph), anchor_place, cut))
            del self._known[_MAX_SHAPES:]
        return CutGraph(graph.nodes, graph.edges, cut, _read(graph.nodes, graph.edges, cut))


def _read(nodes, edges, cut):
    """``CutGraph.factors``; None if those of one product cannot be read."""
    found = []
    for put_off in cut.put_off:
        factors = put_off.product.read(nodes[put_off.place], edges[put_off.edges[0]])
        if factors is None:
            return None
        found.append(factors)
    return found
