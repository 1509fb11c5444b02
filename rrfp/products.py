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
        numbers: As ``Product.number_names`` says.
        are_column_major: By operand, whether it is laid out so.
        first_edge: ``(node, number)`` where the first of the gradients goes.
    """

    tensors: list
    versions: list
    numbers: list
    are_column_major: list
    first_edge: tuple


class Product:
    """How gradients of some edges are computed for any node of a kind; holds no tensor.

    A kind's class has ``gradients(gradient, factors, transposed, totals=None)``: those of the
    edges, given that of the output; ``transposed`` says for each how. Where ``totals`` has a tensor
    for an edge, the gradient may be added to it by the product itself, and is None then.

    Attributes:
        indices: The edges, ascending.
        is_leaf: Whether what is added to the product is a leaf.
        saved: The attributes of the node that are read: ``[(raw, plain)]``.
    """

    saved_of_edge = ()  # by edge: the names of the saved tensors that its gradient needs
    number_names = ()  # what else the node saved that gradients need
    operands = ()  # by edge: the name of an operand whose gradient is laid out as it is
    is_joint = False  # whether its gradients for parameters come out of one call

    def __init__(self, indices, is_leaf=False):
        self.indices = indices
        self.is_leaf = is_leaf
        self.has_added = not self.saved_of_edge[indices[0]]
        self.saved = [(f"_raw_saved_{name}", f"_saved_{name}")
                      for index in indices for name in self.saved_of_edge[index]]
        self._numbers = [f"_saved_{name}" for name in self.number_names]
        self._are_left = [index == len(self.saved_of_edge) - 2 for index in indices
                          if self.saved_of_edge[index]]
        operands = [self.operands[index] for index in indices if index < len(self.operands)]
        self._layouts = [(f"_saved_{name}_sym_sizes", f"_saved_{name}_sym_strides")
                         for name in operands if name is not None]

    def __init_subclass__(cls):
        names = dict.fromkeys(name for of_edge in cls.saved_of_edge for name in of_edge)
        cls._raw_names = tuple(f"_raw_saved_{name}" for name in names)

    @classmethod
    def is_packed(cls, node):
        """Whether somebody's hooks packed what the node saved, so it can be read only once."""
        for name in cls._raw_names:
            if getattr(node, name).unpack_hook is not None:
                return True
        return False

    @classmethod
    def can_reach(cls, index, twig):
        """Whether the gradient of edge ``index`` can be computed for such a twig."""
        return bool(cls.saved_of_edge[index]) or hasattr(twig, "_input_metadata")

    def read(self, node, first_edge):
        """The ``Factors`` of a node; ``first_edge`` is the first of ``indices``.

        None where the gradients cannot be computed here: packed, complex, nested, sparse or other
        special tensors.
        """
        tensors, versions, are_column_major = [], [], []
        for raw_name, name in self.saved:
            if getattr(node, raw_name).unpack_hook is not None:
                return None
            tensor = getattr(node, name)
            if (
                type(tensor) not in _PLAIN_TENSORS or tensor.layout is not torch.strided
                or tensor.is_nested or tensor.is_complex()
            ):
                return None
            tensors.append(tensor)
            versions.append(tensor._version)
        if not tensors:
            metadata = node._input_metadata[0]
            if metadata.dtype.is_complex or metadata.is_nested_tensor:
                return None
        for sizes_name, strides_name in self._layouts:
            sizes, strides = getattr(node, sizes_name), getattr(node, strides_name)
            if len(strides) != len(sizes):
                return None  # a sparse operand
            are_column_major.append(strides[0] == 1 and strides[1] == sizes[0])
        numbers = [getattr(node, name) for name in self._numbers]
        return Factors(tensors, versions, numbers, are_column_major, first_edge)


def _scaled(gradient, factor):
    return gradient if factor == 1 else gradient * factor


def _sum_to(gradient, shape):
    """As ``sum_to_size``, which takes longer in the usual case."""
    if gradient.shape[1:] == shape:
        return gradient.sum(0)
    return gradient.sum_to_size(shape)


class _Sum(Product):
    """alpha * left @ right, to which beta times something may be added."""

    def gradients(self, gradient, factors, transposed, totals=None):
        tensors, _, numbers, are_column_major, first_edge = factors
        alpha, beta = numbers or (1, 1)
        found = self.of_operands(gradient, tensors, alpha, are_column_major, transposed, totals)
        if self.has_added:
            node, number = first_edge
            if self.is_leaf:
                shape = node.variable.shape
            else:
                shape = torch.Size(node._input_metadata[number].shape)
            value = _sum_to(_scaled(gradient, beta), shape)
            found.insert(0, value.t() if transposed[0] else value)
        return found


class _MatrixProduct(_Sum):
    def of_operands(self, gradient, tensors, alpha, are_column_major, transposed, totals):
        """Laid out as the operands are, like torch's own."""
        found = []
        totals = totals[self.has_added:] if totals else [None] * len(tensors)
        for is_left, other, is_column_major, is_transposed, total in zip(
            self._are_left, tensors, are_column_major, transposed[self.has_added:], totals
        ):
            if is_left:
                left, right = (other, gradient.t()) if is_column_major else (gradient, other.t())
            else:
                left, right = (gradient.t(), other) if is_column_major else (other.t(), gradient)
            if total is not None and total.dtype is left.dtype is right.dtype:
                total = total if is_column_major is is_transposed else total.t()
                total.addmm_(left, right, alpha=alpha)
                found.append(None)
                continue
            value = left.mm(right)
            if alpha != 1:
                value = value * alpha
            found.append(value if is_column_major is is_transposed else value.t())
        return found


class _Addmm(_MatrixProduct):
    saved_of_edge = ((), ("mat2",), ("mat1",))
    number_names = ("alpha", "beta")
    operands = (None, "mat1", "mat2")


class _Mm(_MatrixProduct):
    saved_of_edge = (("mat2",), ("self",))
    operands = ("self", "mat2")


class _BatchedProduct(_Sum):
    def of_operands(self, gradient, tensors, alpha, are_column_major, transposed, totals):
        found = []
        for is_left, other in zip(self._are_left, tensors):
            other = other.transpose(1, 2)
            found.append(_scaled(gradient.bmm(other) if is_left else other.bmm(gradient), alpha))
        return found


class _Bmm(_BatchedProduct):
    saved_of_edge = (("mat2",), ("self",))


class _Baddbmm(_BatchedProduct):
    saved_of_edge = ((), ("batch2",), ("batch1",))
    number_names = ("alpha", "beta")


class _Convolution(Product):
    saved_of_edge = (("weight",), ("input", "weight"), ("input", "weight"))
    number_names = ("bias_sym_sizes_opt", "stride", "padding", "dilation", "transposed",
                    "output_padding", "groups")
    is_joint = True

    @classmethod
    def can_reach(cls, index, twig):
        return index != 0

    def gradients(self, gradient, factors, transposed, totals=None):
        activation, weight = factors.tensors[:2]
        wanted = [False, 1 in self.indices, 2 in self.indices]
        found = torch.ops.aten.convolution_backward(
            gradient, activation, weight, *factors.numbers, wanted
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
