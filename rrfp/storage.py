"""Where tensors have their memory: what tells that two of them share it."""

import torch


# Types that are what they seem: no part elsewhere, nothing on its way. Looking for an attribute
# that is not there takes longer than all else here.
_PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)
_use_count = getattr(torch._C, "_storage_Use_Count", None)


def settled(tensor):
    """The tensor itself; of a collective's result that is still on its way, what it becomes."""
    if type(tensor) in _PLAIN_TYPES:
        return tensor
    return tensor.wait() if hasattr(tensor, "trigger_wait") else tensor


def storage_address(tensor):
    """Where a tensor's memory begins; 0 where there is none of its own (sparse, meta).

    A DTensor has the memory of this rank's part.
    """
    if type(tensor) not in _PLAIN_TYPES:
        tensor = settled(getattr(tensor, "_local_tensor", tensor))
    if tensor.layout is not torch.strided:
        return 0
    return tensor.untyped_storage().data_ptr()


def is_shared(tensor):
    """Whether another tensor may have the same memory now; True where that cannot be known."""
    if tensor.layout is not torch.strided or _use_count is None:
        return True
    # Its own reference, and that of the storage object made here.
    return _use_count(tensor.untyped_storage()._cdata) > 2


def overlaps(tensor, others):
    """Whether the tensor has a byte in common with one of the others, by their extents."""
    begin, end = _extent(tensor)
    return any(begin < other[1] and other[0] < end for other in map(_extent, others))


def _extent(tensor):
    if tensor.layout is not torch.strided or tensor.numel() == 0:
        return 0, 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    begin = tensor.data_ptr()
    return begin, begin + (last + 1) * tensor.element_size()
