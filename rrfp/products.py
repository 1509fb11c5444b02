"""Matrix products and convolutions, whose gradients are products of their own.

The autograd node of each computes only the gradients that are asked for. A ``Product`` computes
others later, with the same operations as torch's own backward, hence with the same bits. It needs
what the node saved; ``read`` takes that before the node runs and lets go of it.
"""

import torch

_PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter)


class Product:
    """What the put-off gradients of one node need.

    Attributes:
        tensors: Those that the node saved.
        versions: Theirs when they were read.
    """

    saved_of_edge = ()  # by edge: the names of the saved tensors that its gradient needs
    is_joint = False  # whether its gradients for parameters come out of one call

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

    @classmethod
    def read(cls, node, indices):
        """The ``Product`` of a node that is not packed, for the gradients of some of its edges.

        None where this class cannot compute them: complex, nested, sparse or other special
        tensors.
        """
        self = cls()
        self.indices = indices
        self.tensors = tensors = []
        self.shape = None
        for index in indices:
            names = cls.saved_of_edge[index]
            if not names:
                twig, number = node.next_functions[index]
                self.shape = twig._input_metadata[number].shape
            for name in names:
                tensors.append(getattr(node, "_saved_" + name))
        if not tensors:
            metadata = node._input_metadata[0]
            if metadata.dtype.is_complex or metadata.is_nested_tensor:
                return None
        for tensor in tensors:
            if (
                type(tensor) not in _PLAIN_TENSORS or tensor.layout is not torch.strided
                or tensor.is_nested or tensor.is_complex()
            ):
                return None
        self.versions = [tensor._version for tensor in tensors]
        return self if self.read_settings(node) else None

    def read_settings(self, node):
        """Take what else the gradients need. False if an operand is of no use (sparse)."""
        return True

    def gradients(self, gradient, transposed):
        """Those of the edges, given that of the output; ``transposed`` says for each how."""
        tensors = iter(self.tensors)
        found = []
        for index, is_transposed in zip(self.indices, transposed):
            if self.saved_of_edge[index]:
                value = self.of_operand(index, gradient, next(tensors), is_transposed)
            else:
                value = _sum_to(_scaled(gradient, self.beta), self.shape)
                if is_transposed:
                    value = value.t()
            found.append(value)
        return found


def _scaled(gradient, factor):
    return gradient if factor == 1 else gradient * factor


def _sum_to(gradient, shape):
    """As ``sum_to_size``, which takes longer in the usual case."""
    if len(shape) == 1 and gradient.shape[1:] == shape:
        return gradient.sum(0)
    return gradient.sum_to_size(shape)


def _is_column_major(sizes, strides):
    return strides[0] == 1 and strides[1] == sizes[0]


class _MatrixProduct(Product):
    """left @ right; the gradient of each is laid out as it is, and made by torch accordingly."""

    operands = ()  # by edge: the name of the operand there, None for what is added
    alpha = beta = 1

    def read_settings(self, node):
        self.layouts = []
        for index in self.indices:
            name = self.operands[index]
            if name is not None:
                sizes = getattr(node, f"_saved_{name}_sym_sizes")
                strides = getattr(node, f"_saved_{name}_sym_strides")
                if len(strides) != len(sizes):
                    return False
                self.layouts.append(_is_column_major(sizes, strides))
        return True

    def of_operand(self, index, gradient, other, is_transposed):
        is_column_major = self.layouts[-1 if index == self.indices[-1] else 0]
        if index == len(self.operands) - 2:  # the left one
            if is_column_major:
                value = other.mm(gradient.t())
            else:
                value = gradient.mm(other.t())
        elif is_column_major:
            value = gradient.t().mm(other)
        else:
            value = other.t().mm(gradient)
        value = _scaled(value, self.alpha)
        return value if is_column_major is is_transposed else value.t()


class _Addmm(_MatrixProduct):
    saved_of_edge = ((), ("mat2",), ("mat1",))
    operands = (None, "mat1", "mat2")

    def read_settings(self, node):
        self.alpha, self.beta = node._saved_alpha, node._saved_beta
        return super().read_settings(node)


class _Mm(_MatrixProduct):
    saved_of_edge = (("mat2",), ("self",))
    operands = ("self", "mat2")


class _BatchedProduct(Product):
    alpha = beta = 1

    def of_operand(self, index, gradient, other, is_transposed):
        if index == len(self.saved_of_edge) - 2:  # the left one
            return _scaled(gradient.bmm(other.transpose(1, 2)), self.alpha)
        return _scaled(other.transpose(1, 2).bmm(gradient), self.alpha)


class _Bmm(_BatchedProduct):
    saved_of_edge = (("mat2",), ("self",))


class _Baddbmm(_BatchedProduct):
    saved_of_edge = ((), ("batch2",), ("batch1",))

    def read_settings(self, node):
        self.alpha, self.beta = node._saved_alpha, node._saved_beta
        return True


class _Convolution(Product):
    saved_of_edge = (("weight",), ("input", "weight"), ("input", "weight"))
    is_joint = True

    @classmethod
    def can_reach(cls, index, twig):
        return index != 0

    def read_settings(self, node):
        self.settings = (
            node._saved_bias_sym_sizes_opt,
            node._saved_stride,
            node._saved_padding,
            node._saved_dilation,
            node._saved_transposed,
            node._saved_output_padding,
            node._saved_groups,
        )
        return True

    def gradients(self, gradient, transposed):
        activation, weight = self.tensors[:2]
        wanted = [False, 1 in self.indices, 2 in self.indices]
        found = torch.ops.aten.convolution_backward(
            gradient, activation, weight, *self.settings, wanted
        )
        return [found[index] for index in self.indices]


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
