"""Matrix products and convolutions, whose gradients are products of their own.

The autograd node of each computes only the gradients that are asked for. A ``Product`` computes
one of the others later, with the same operations as torch's own backward, hence with the same
bits. It needs what the node saved; ``read()`` takes that before the node runs and lets go of it.
"""

import torch

_PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter)


class Product:
    """One node of the backward graph.

    Attributes:
        is_packed: Somebody's hooks packed what it saved, so it can be read only once.
        is_joint: Its gradients for parameters come out of one call.
    """

    saved_of_edge = ()  # by edge: the names of the saved tensors that its gradient needs
    is_joint = False

    def __init__(self, node):
        self.node = node
        saved = {name for names in self.saved_of_edge for name in names}
        self.is_packed = any(
            getattr(node, f"_raw_saved_{name}").unpack_hook is not None for name in saved
        )

    def covers(self, index, twig):
        """Whether the gradient of edge ``index`` to ``twig`` can be computed by this class."""
        metadata = self.node._input_metadata[0]
        if metadata.dtype.is_complex or metadata.is_nested_tensor:
            return False
        if not self.saved_of_edge[index] and not hasattr(twig, "_input_metadata"):
            return False
        if any(len(strides) != len(sizes) for sizes, strides in self.layouts_of(index)):
            return False  # the operand itself is sparse
        return all(
            type(tensor) in _PLAIN_TENSORS and tensor.layout is torch.strided
            for tensor in self._saved(index)
        )

    def layouts_of(self, index):
        """(sizes, strides) of the operand that the edge leads to, if its gradient heeds them."""
        return ()

    def _saved(self, index):
        return [getattr(self.node, f"_saved_{name}") for name in self.saved_of_edge[index]]

    def read(self, indices):
        """Take from the node what the gradients of the edges need; the node is let go."""
        self.saved = {index: self._saved(index) for index in indices}
        self.shapes = {
            index: self.node.next_functions[index] for index in indices
            if not self.saved_of_edge[index]
        }
        self.shapes = {
            index: twig._input_metadata[number].shape
            for index, (twig, number) in self.shapes.items()
        }
        self.read_settings()
        self.node = None

    def read_settings(self):
        """What else the gradients need: numbers that the node keeps."""

    def gradients(self, gradient, indices):
        """The gradients of the edges in this order, given the gradient of the output."""
        return [self.gradient(gradient, index) for index in indices]


def _scaled(gradient, factor):
    return gradient if factor == 1 else gradient * factor


def _is_column_major(sizes, strides):
    return strides[0] == 1 and strides[1] == sizes[0]


def _left(gradient, right, sizes, strides, factor):
    """d(left @ right) for left, laid out as left is."""
    if _is_column_major(sizes, strides):
        return _scaled(right.mm(gradient.t()).t(), factor)
    return _scaled(gradient.mm(right.t()), factor)


def _right(gradient, left, sizes, strides, factor):
    if _is_column_major(sizes, strides):
        return _scaled(gradient.t().mm(left).t(), factor)
    return _scaled(left.t().mm(gradient), factor)


class _Addmm(Product):
    saved_of_edge = ((), ("mat2",), ("mat1",))

    def layouts_of(self, index):
        node = self.node
        if index == 0:
            return ()
        if index == 1:
            return ((node._saved_mat1_sym_sizes, node._saved_mat1_sym_strides),)
        return ((node._saved_mat2_sym_sizes, node._saved_mat2_sym_strides),)

    def read_settings(self):
        self.alpha, self.beta = self.node._saved_alpha, self.node._saved_beta
        self.layouts = [next(iter(self.layouts_of(index)), None) for index in range(3)]

    def gradient(self, gradient, index):
        if index == 0:
            return _scaled(gradient, self.beta).sum_to_size(self.shapes[0])
        side = _left if index == 1 else _right
        return side(gradient, *self.saved[index], *self.layouts[index], self.alpha)


class _Mm(Product):
    saved_of_edge = (("mat2",), ("self",))

    def layouts_of(self, index):
        node = self.node
        if index == 0:
            return ((node._saved_self_sym_sizes, node._saved_self_sym_strides),)
        return ((node._saved_mat2_sym_sizes, node._saved_mat2_sym_strides),)

    def read_settings(self):
        self.layouts = [self.layouts_of(index)[0] for index in range(2)]

    def gradient(self, gradient, index):
        side = (_left, _right)[index]
        return side(gradient, *self.saved[index], *self.layouts[index], 1)


class _Bmm(Product):
    saved_of_edge = (("mat2",), ("self",))

    def gradient(self, gradient, index):
        (other,) = self.saved[index]
        if index == 0:
            return gradient.bmm(other.transpose(1, 2))
        return other.transpose(1, 2).bmm(gradient)


class _Baddbmm(Product):
    saved_of_edge = ((), ("batch2",), ("batch1",))

    def read_settings(self):
        self.alpha, self.beta = self.node._saved_alpha, self.node._saved_beta

    def gradient(self, gradient, index):
        if index == 0:
            return _scaled(gradient, self.beta).sum_to_size(self.shapes[0])
        (other,) = self.saved[index]
        if index == 1:
            return _scaled(gradient.bmm(other.transpose(1, 2)), self.alpha)
        return _scaled(other.transpose(1, 2).bmm(gradient), self.alpha)


class _Convolution(Product):
    saved_of_edge = (("weight",), ("input", "weight"), ("input", "weight"))
    is_joint = True

    def covers(self, index, twig):
        return index != 0 and super().covers(index, twig)

    def read_settings(self):
        node = self.node
        self.settings = (
            node._saved_bias_sym_sizes_opt,
            node._saved_stride,
            node._saved_padding,
            node._saved_dilation,
            node._saved_transposed,
            node._saved_output_padding,
            node._saved_groups,
        )

    def gradients(self, gradient, indices):
        activation, weight = self.saved[indices[0]]
        wanted = [False, 1 in indices, 2 in indices]
        found = torch.ops.aten.convolution_backward(
            gradient, activation, weight, *self.settings, wanted
        )
        return [found[index] for index in indices]


_PRODUCTS = {
    "AddmmBackward0": _Addmm,
    "MmBackward0": _Mm,
    "BmmBackward0": _Bmm,
    "BaddbmmBackward0": _Baddbmm,
    "ConvolutionBackward0": _Convolution,
}


def product_at(node):
    """The ``Product`` of an autograd node, or None when it is no such node."""
    kind = _PRODUCTS.get(type(node).__name__)
    return None if kind is None else kind(node)
