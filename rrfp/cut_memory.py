"""What a stage knows of its backward graphs from one microbatch to the next."""

from rrfp.backward_graph import Graph, GraphShape
from rrfp.gradient_graph import find_cut

# A stage may take different ways through its module; each has a shape of its own.
_MAX_SHAPES = 4


class CutMemory:
    """The cuts of the graphs that were seen last, by shape; neither nodes nor tensors."""

    def __init__(self):
        self._known = []  # [(GraphShape, place of the anchor, Cut)], the last used first

    def cut(self, roots, anchor):
        """(nodes by place, Cut, products read) of the roots' graph; products by ``put_off``.

        None when no root depends on ``anchor``. Reads the graph and changes nothing. Whatever a
        cut rests on is looked at anew for every graph.
        """
        for number, (shape, anchor_place, cut) in enumerate(self._known):
            nodes = shape.find(roots)
            if nodes is None or nodes[anchor_place].variable is not anchor:
                continue
            products = _read(nodes, cut) if cut.fits(nodes) else None
            if products is None:
                del self._known[number]
                break
            if number:
                self._known.insert(0, self._known.pop(number))
            return nodes, cut, products
        graph = Graph(roots)
        anchor_place = graph.place_of_leaf(anchor)
        if anchor_place is None:
            return None
        cut = find_cut(graph, anchor_place)
        if cut.is_lasting:
            self._known.insert(0, (GraphShape(graph), anchor_place, cut))
            del self._known[_MAX_SHAPES:]
        return graph.nodes, cut, _read(graph.nodes, cut)


def _read(nodes, cut):
    """The products that are put off; None if one of them cannot be."""
    products = []
    for put_off in cut.put_off:
        product = put_off.product.read(nodes[put_off.place], put_off.indices)
        if product is None:
            return None
        products.append(product)
    return products
