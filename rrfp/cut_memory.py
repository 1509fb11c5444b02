"""What a stage knows of its backward graphs from one microbatch to the next."""

from typing import NamedTuple

from rrfp.backward_graph import Graph, GraphShape
from rrfp.gradient_graph import Cut, find_cut

# A stage may take different ways through its module; each has a shape of its own.
_MAX_SHAPES = 4


class CutGraph(NamedTuple):
    """A graph with its cut and what the products that are put off need.

    Attributes:
        nodes: By place.
        cut: The cut.
        products: By ``cut.put_off``: ``(PutOff, Factors, edges of the put-off gradients)``.
    """

    nodes: list
    cut: Cut
    products: list


class CutMemory:
    """The cuts of the graphs that were seen last, by shape; neither nodes nor tensors."""

    def __init__(self):
        self._known = []  # [(GraphShape, place of the anchor, Cut)], the last used first

    def cut(self, roots, anchor):
        """The ``CutGraph`` of the roots, or None when none of them depends on ``anchor``.

        Reads the graph and changes nothing. Whatever a cut rests on is looked at anew for every
        graph.
        """
        for number, (shape, anchor_place, cut) in enumerate(self._known):
            found = shape.find(roots)
            if found is None or found[0][anchor_place].variable is not anchor:
                continue
            products = _read(*found, cut) if cut.fits(found[0]) else None
            if products is None:
                del self._known[number]
                break
            if number:
                self._known.insert(0, self._known.pop(number))
            return CutGraph(found[0], cut, products)
        graph = Graph(roots)
        anchor_place = graph.place_of_leaf(anchor)
        if anchor_place is None:
            return None
        cut = find_cut(graph, anchor_place)
        if cut.is_lasting:
            self._known.insert(0, (GraphShape(graph), anchor_place, cut))
            del self._known[_MAX_SHAPES:]
        return CutGraph(graph.nodes, cut, _read(graph.nodes, graph.edges, cut))


def _read(nodes, edges, cut):
    """``CutGraph.products``; None if what one of them needs cannot be read."""
    products = []
    for put_off in cut.put_off:
        chosen = [edges[number] for number in put_off.edges]
        factors = put_off.product.read(nodes[put_off.place], chosen)
        if factors is None:
            return None
        products.append((put_off, factors, chosen))
    return products
