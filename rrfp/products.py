"""Matrix products and convolutions, whose gradients are products of their own.

The autograd node of each computes only the gradients that are asked for. A ``Product`` computes
others later, with the same operations as torch's own backward, hence with the same bits. What it
needs is read from the node before that runs; the node itself is let go.
"""

from typing import NamedTuple

import torch

_PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter)


class Factors(NamedTuple):
    """What the put-off gradients of one node need.

    Attributes:
        tensors: Those that the node saved.
        versions: Theirs when they were read.
        settings: Numbers, as the ``Product`` wants them.
    """

    tensors: list
    versions: list
    settings: tuple


class Product:
    """How gradients of some edges are computed for any node of a kind; holds no tensor."""

    saved_of_edge = ()  # by edge: the names of the saved tensors that its gradient needs
    is_joint = False  # whether its gradients for parameters come out of one call

    def __init__(self, indices):
        self.indices = indices
        self._saved = [f"_saved_{name}" for index in indices for name in self.saved_of_edge[index]]

    @classmethod
    def is_packed(cls, node):
        """Whether somebody's hooks packed what the node saved, so it can be read only once."""
        for name in cls._raw_names:
            if getattr(node, name).unpack_hook is not None:
                return True
        return False

    def __init_subclass__(cls):
        names = dict.fromkeys(name for of_edge in cls.saved_of_edge for name in of_edge)
        cls._raw_names = tuple(f"_raw_saved_{name}" for name in names)

    @classmethod
    def can_reach(cls, index, twig):
        """Whether the gradient of edge ``index`` can be computed for such a twig."""
        return bool(cls.saved_of_edge[index]) or hasattr(twig, "_input_metadata")

    def read(self, node, edges):
        """The ``Factors`` of a node that is not packed, whose edges of ``indices`` these are.

        None where the gradients cannot be computed here: complex, nested, sparse or other special
        tensors.
        """
        tensors = []
        for name in self._saved:
            tensor = getattr(node, name)
            if (
                type(tensor) not in _PLAIN_TENSORS or tensor.layout is not torch.strided
                or tensor.is_nested or tensor.is_complex()
            ):
                return None
            tensors.append(tensor)
        if not tensors:
            metadata = node._input_metadata[0]
            if metadata.dtype.is_complex or metadata.is_nested_tensor:
                return None
        settings = self.settings(node, edges)
        if settings is None:
            return None
        return Factors(tensors, [tensor._version for tensor in tensors], settings)

    def settings(self, node, edges):
        """What else the gradients need. None if an operand is of no use (sparse)."""
        raise NotImplementedError

    def gradients(self, gradient, factors, transposed):
        """Those of the edges, given that of the output; ``transposed`` says for each how."""
        raise NotImplementedError


def _scaled(gradient, factor):
    return gradient if factor == 1 else gradient * factor


def _shape_behind(edge):
    """Of the tensor whose gradient takes the edge."""
    node, number = edge
    # A leaf's is at hand.
    variable = getattr(node, "variable", None)
    return tuple(node._input_metadata[number].shape if variable is None else variable.shape)


def _sum_to(gradient, shape):
    """As ``sum_to_size``, which takes longer in the usual case."""
    if gradient.shape[1:] == shape:
        return gradient.sum(0)
    return gradient.sum_to_size(shape)


class _Sum(Product):
    """alpha * left @ right, to which beta times something may be added."""

    is_scaled = False  # whether there are alpha and beta

    def settings(self, node, edges):
        added = None
        if not self.saved_of_edge[self.indices[0]]:
            added = _shape_behind(edges[0])
        if self.is_scaled:
            return added, node._saved_alpha, node._saved_beta
        return added, 1, 1

    def gradients(self, gradient, factors, transposed):
        tensors, _, settings = factors
        found = []
        if settings[0] is not None:
            value = _sum_to(_scaled(gradient, settings[2]), settings[0])
            found.append(value.t() if transposed[0] else value)
        for number, tensor in enumerate(tensors):
            place = len(found)
            is_left = self.indices[place] == len(self.saved_of_edge) - 2
            value = self.of_operand(
                gradient, tensor, is_left, transposed[place], number, settings
            )
            found.append(value)
        return found


class _MatrixProduct(_Sum):
    """The gradient of each operand is laid out as it is, and made by torch accordingly."""

    operands = ()  # by edge: the name of the operand there, None for what is added

    def __init__(self, indices):
        super().__init__(indices)
        names = [self.operands[index] for index in indices if self.operands[index] is not None]
        self._layouts = [(f"_saved_{name}_sym_sizes", f"_saved_{name}_sym_strides")
                         for name in names]

    def settings(self, node, edges):
        found = super().settings(node, edges)
        for sizes, strides in self._layouts:
            sizes, strides = getattr(node, sizes), getattr(node, strides)
            if len(strides) != len(sizes):
                return None
            found += (strides[0] == 1 and strides[1] == sizes[0],)
        return found

    def of_operand(self, gradient, other, is_left, is_transposed, number, settings):
        is_column_major = settings[3 + number]
        if is_left:
            value = other.mm(gradient.t()) if is_column_major else gradient.mm(other.t())
        else:
            value = gradient.t().mm(other) if is_column_major else other.t().mm(gradient)
        value = _scaled(value, settings[1])
        return value if is_column_major is is_transposed else value.t()


class _Addmm(_MatrixProduct):
    saved_of_edge = ((), ("mat2",), ("mat1",))
    operands = (None, "mat1", "mat2")
    is_scaled = True


class _Mm(_MatrixProduct):
    saved_of_edge = (("mat2",), ("self",))
    operands = ("self", "mat2")


class _BatchedProduct(_Sum):
    def of_operand(self, gradient, other, is_left, is_transposed, number, settings):
        if is_left:
            return _scaled(gradient.bmm(other.transpose(1, 2)), settings[1])
        return _scaled(other.transpose(1, 2).bmm(gradient), settings[1])


class _Bmm(_BatchedProduct):
    saved_of_edge = (("mat2",), ("self",))


class _Baddbmm(_BatchedProduct):
    saved_of_edge = ((), ("batch2",), ("batch1",))
    is_scaled = True


class _Convolution(Product):
    saved_of_edge = (("weight",), ("input", "weight"), ("input", "weight"))
    is_joint = True

    @classmethod
    def can_reach(cls, index, twig):
        return index != 0

    def settings(self, node, edges):
        return (
            node._saved_bias_sym_sizes_opt,
            node._saved_stride,
            node._saved_padding,
            node._saved_dilation,
            node._saved_transposed,
            node._saved_output_padding,
            node._saved_groups,
        )

    def gradients(self, gradient, factors, transposed):
        activation, weight = factors.tensors[:2]
        wanted = [False, 1 in self.indices, 2 in self.indices]
        found = torch.ops.aten.convolution_backward(
            gradient, activation, weight, *factors.settings, wanted
        )
        return [found[index].t() if is_transposed else found[index]
                for index, is_transposed in zip(self.indices, transposed)]


_PRODUCTS = {
    "AddmmBackward0": _Addmm,
    "MmBackward0": _Mm,
    "BmmBackward0": _Bmm,
    "BaddbmmBackward0": _Baddbmm,
    "ConvolutionBackward0": _Convolution,
}


def product_class(node):
    """The kind of ``Product`` of an autograd node, or None when it is no such node."""
    return _PRODUCTS.get(type(node).__name__)
