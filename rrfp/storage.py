"""Where tensors have their memory: what tells that two of them share it."""

import torch


def settled(tensor):
    """The tensor itself; of a collective's result that is still on its way, what it becomes."""
    return tensor.wait() if hasattr(tensor, "trigger_wait") else tensor


def storage_address(tensor):
    """Where a tensor's memory begins; 0 where there is none of its own (sparse, meta).

    A DTensor has the memory of this rank's part.
    """
    part = settled(getattr(tensor, "_local_tensor", tensor))
    if part.layout is not torch.strided:
        return 0
    return part.untyped_storage().data_ptr()
