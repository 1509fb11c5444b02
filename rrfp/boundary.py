"""What crosses a boundary between stages: values as parcels, and parcels as bytes.

A parcel is a flattened value: tensors, ``None`` and small picklable objects in a tree. Inside
one process it is handed over as it is. Between processes its tensors travel as raw memory and
the rest as metadata:

    u32 length of the tree | tree | per leaf: a descriptor | pickle of the other leaves

The tree is the pickled structure; both sides remember what they have seen, so that the steady
path neither pickles nor unpickles it, nor reads metadata that it has read before. A descriptor is
a dtype code (0: None, 255: picklable), flags, the number of dimensions and the shape.
"""

import io
import math
import pickle
import struct

import torch
import torch.utils._pytree as pytree
from torch.utils import dlpack

_NONE, _PICKLED = 0, 255
_REQUIRES_GRAD = 1
_MAX_REMEMBERED = 1024
_MAX_REMEMBERED_BYTES = 4096  # of one metadata
_MAX_METADATA_BYTES = 1 << 20

# torch dtype, DLPack type code, bits. The position is the code on the wire: only append.
_DLPACK_DTYPES = (
    (torch.float32, 2, 32),
    (torch.float64, 2, 64),
    (torch.float16, 2, 16),
    (torch.bfloat16, 4, 16),
    (torch.int64, 0, 64),
    (torch.int32, 0, 32),
    (torch.int16, 0, 16),
    (torch.int8, 0, 8),
    (torch.uint8, 1, 8),
    (torch.bool, 6, 8),
    (torch.complex64, 5, 64),
    (torch.complex128, 5, 128),
)
# Dtypes that DLPack lacks, or that not every torch takes from it, travel as bytes.
_BYTE_DTYPE_NAMES = (
    "uint16",
    "uint32",
    "uint64",
    "float8_e4m3fn",
    "float8_e5m2",
    "float8_e4m3fnuz",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
    "complex32",
)
_CODE_OF_DTYPE = {dtype: 1 + i for i, (dtype, _, _) in enumerate(_DLPACK_DTYPES)}
_FIRST_BYTE_CODE = 64
_BYTE_DTYPES = {
    _FIRST_BYTE_CODE + i: getattr(torch, name)
    for i, name in enumerate(_BYTE_DTYPE_NAMES)
    if hasattr(torch, name)
}
_CODE_OF_DTYPE.update({dtype: code for code, dtype in _BYTE_DTYPES.items()})

# What dlpack.from_dlpack comes to for a capsule, after it has looked for what a capsule lacks.
_from_capsule = getattr(torch._C, "_from_dlpack", dlpack.from_dlpack)

_SINGLE = None  # the tree of a value that is one leaf
_length = struct.Struct("<I")
_shape_formats = [struct.Struct(f"<BBB{n}q") for n in range(65)]


class Parcel:
    """A flattened boundary value, or the gradients for one.

    Attributes:
        tree: torch's tree spec, or None when the value is a single leaf.
        leaves: Tensors, None and picklable objects, in the tree's order. Tensors are detached.
        needs_grad: Indices of the leaves whose gradient the producer wants.
    """

    __slots__ = ("tree", "leaves", "needs_grad")

    def __init__(self, tree, leaves, needs_grad=()):
        self.tree = tree
        self.leaves = leaves
        self.needs_grad = needs_grad

    def value(self):
        """The tree again."""
        if self.tree is None:
            return self.leaves[0]
        return pytree.tree_unflatten(self.leaves, self.tree)


def flatten(value):
    """(tree, leaves) of a boundary value."""
    if type(value) is torch.Tensor:
        return _SINGLE, [value]
    leaves, tree = pytree.tree_flatten(value)
    return tree, leaves


_tree_bytes = {}  # tree -> bytes
_trees = {}  # bytes -> tree


def _remember(memory, key, value):
    if len(memory) >= _MAX_REMEMBERED:
        memory.clear()
    memory[key] = value
    return value


def _encode_tree(tree):
    if tree is None:
        return b""
    known = _tree_bytes.get(tree)
    if known is not None:
        return known
    # The value with 0 for its leaves, because torch's own specs warn when they are unpickled.
    skeleton = pytree.tree_unflatten([0] * tree.num_leaves, tree)
    return _remember(_tree_bytes, tree, pickle.dumps(skeleton))


def _decode_tree(data):
    if not data:
        return None
    tree = _trees.get(data)
    if tree is None:
        tree = _remember(_trees, data, pytree.tree_structure(pickle.loads(data)))
    return tree


class _TensorFinder(pickle.Pickler):
    """Pickles into nothing, to see whether a tensor is inside."""

    def persistent_id(self, value):
        if isinstance(value, torch.Tensor):
            raise _TensorFound
        return None


class _TensorFound(Exception):
    pass


def refuse_hidden_tensors(stage, value):
    """Refuse a leaf of a stage's output whose tensors would cross without their gradient.

    Raises:
        ValueError: It holds a tensor, or cannot be pickled.
    """
    kind = type(value).__name__
    try:
        _TensorFinder(io.BytesIO()).dump(value)
    except _TensorFound:
        raise ValueError(
            f"stage {stage} returned a {kind} that holds a tensor. Only tensors in tuples, lists "
            "and dicts (and what torch.utils._pytree.register_pytree_node knows) keep their "
            "gradient across a boundary; return the tensor itself, or register the type."
        ) from None
    except Exception as error:
        raise ValueError(
            f"stage {stage} returned a {kind} that cannot be pickled ({error}); return tensors, "
            "None and small picklable values."
        ) from error


def _sendable(tensor):
    """The tensor as one run of memory; the same object when it is that already."""
    if type(tensor) is not torch.Tensor:
        raise ValueError(
            f"a {type(tensor).__name__} cannot cross a boundary between processes, where it would "
            "arrive as a plain tensor; return plain tensors."
        )
    if tensor.layout != torch.strided:
        raise ValueError(
            f"a {tensor.layout} tensor cannot cross a boundary between processes; call "
            ".to_dense() in the stage."
        )
    if tensor.dtype not in _CODE_OF_DTYPE:
        raise ValueError(f"a tensor of {tensor.dtype} cannot cross a boundary between processes.")
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    return tensor if tensor.is_contiguous() else tensor.contiguous()


_tensor_metadata = {}  # (dtype, shape, whether it needs grad) -> metadata of that tensor alone


def _descriptor(tensor, flags):
    shape = tensor.shape
    return _shape_formats[len(shape)].pack(
        _CODE_OF_DTYPE[tensor.dtype], flags, len(shape), *shape
    )


def encode(parcel):
    """(metadata, segments, owner): what ``Runtime.post_tensors`` takes."""
    needs_grad = parcel.needs_grad
    if parcel.tree is None and type(parcel.leaves[0]) is torch.Tensor:
        tensor = _sendable(parcel.leaves[0])
        key = tensor.dtype, tensor.shape, bool(needs_grad)
        metadata = _tensor_metadata.get(key)
        if metadata is None:
            flags = _REQUIRES_GRAD if needs_grad else 0
            metadata = _remember(_tensor_metadata, key,
                                 _length.pack(0) + _descriptor(tensor, flags))
        return metadata, [(tensor.data_ptr(), tensor.nbytes)], [tensor]
    descriptors, segments, owner, pickled = [], [], [], []
    for index, leaf in enumerate(parcel.leaves):
        if isinstance(leaf, torch.Tensor):
            tensor = _sendable(leaf)
            owner.append(tensor)
            segments.append((tensor.data_ptr(), tensor.nbytes))
            flags = _REQUIRES_GRAD if index in needs_grad else 0
            descriptors.append(_descriptor(tensor, flags))
        elif leaf is None:
            descriptors.append(_shape_formats[0].pack(_NONE, 0, 0))
        else:
            descriptors.append(_shape_formats[0].pack(_PICKLED, 0, 0))
            pickled.append(leaf)
    tree = _encode_tree(parcel.tree)
    tail = pickle.dumps(pickled) if pickled else b""
    metadata = b"".join((_length.pack(len(tree)), tree, *descriptors, tail))
    if len(metadata) > _MAX_METADATA_BYTES:
        raise ValueError(
            f"a boundary value has {len(metadata)} bytes of metadata, {len(tail)} of them "
            f"pickled objects; the limit is {_MAX_METADATA_BYTES}. Send large data as tensors."
        )
    return metadata, segments, owner


def decode(inbound):
    """The parcel of a received message.

    Raises:
        ValueError: The message is damaged; nothing of it is used.
    """
    try:
        return _decode(inbound)
    except Exception as error:
        raise ValueError(
            f"a received message of {len(inbound.metadata)} bytes of metadata is damaged "
            f"({type(error).__name__}: {error}). Run the same version of rrfp and torch on every "
            "rank."
        ) from error


class _Form:
    """What a message's metadata says, but for pickled objects: how to make its parcel."""

    __slots__ = ("tree", "num_leaves", "needs_grad", "layouts", "places", "viewed", "pickled",
                 "num_bytes")


_forms = {}  # metadata -> _Form, of messages without pickled objects


def _decode(inbound):
    metadata = inbound.metadata
    form = _forms.get(metadata)
    if form is None:
        form = _read_form(metadata)
        if not form.pickled and len(metadata) <= _MAX_REMEMBERED_BYTES:
            _remember(_forms, metadata, form)
    leaves = [None] * form.num_leaves
    if form.pickled:
        objects = iter(pickle.loads(metadata[form.num_bytes:]))
        for index in form.pickled:
            leaves[index] = next(objects)
    for index, capsule in zip(form.places, inbound.capsules(form.layouts)):
        leaves[index] = _from_capsule(capsule)
    for index, dtype, shape in form.viewed:
        leaves[index] = leaves[index].view(dtype).view(shape).detach()
    return Parcel(form.tree, leaves, form.needs_grad)


def _read_form(metadata):
    form = _Form()
    (tree_bytes,) = _length.unpack_from(metadata)
    at = 4 + tree_bytes
    form.tree = _decode_tree(metadata[4:at])
    form.num_leaves = 1 if form.tree is None else form.tree.num_leaves
    form.needs_grad, form.layouts, form.places, form.viewed, form.pickled = [], [], [], [], []
    for index in range(form.num_leaves):
        code, flags, num_dimensions = _shape_formats[0].unpack_from(metadata, at)
        if code not in (_NONE, _PICKLED):
            shape = _shape_formats[num_dimensions].unpack_from(metadata, at)[3:]
            form.places.append(index)
            if code >= _FIRST_BYTE_CODE:
                dtype = _BYTE_DTYPES[code]
                form.viewed.append((index, dtype, shape))
                form.layouts.append((1, 8, (math.prod(shape) * dtype.itemsize,)))
            else:
                _, type_code, bits = _DLPACK_DTYPES[code - 1]
                form.layouts.append((type_code, bits, shape))
            if flags & _REQUIRES_GRAD:
                form.needs_grad.append(index)
        elif code == _PICKLED:
            form.pickled.append(index)
        at += _shape_formats[num_dimensions].size
    if not form.pickled and at != len(metadata):
        raise ValueError(f"its leaves end at byte {at}")
    form.num_bytes = at
    return form


def gradients_parcel(gradients):
    """Gradients for the ``needs_grad`` leaves of a parcel, in that order, as a parcel."""
    if len(gradients) == 1:
        return Parcel(_SINGLE, gradients)
    return Parcel(_list_tree(len(gradients)), gradients)


def _list_tree(length):
    tree = _list_trees.get(length)
    if tree is None:
        tree = _remember(_list_trees, length, pytree.tree_structure([0] * length))
    return tree


_list_trees = {}
