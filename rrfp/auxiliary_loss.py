"""Auxiliary losses: what a stage adds to the loss besides its output, such as a gate's balance."""

import threading

import torch

_forward = threading.local()  # .values: what the stage whose forward runs in this thread has added


def aux_loss(value):
    """Add a scalar to the loss of the microbatch, from inside a stage's forward.

    The gradient is that of ``loss + value``: it has the microbatch's weight and ``grad_scale``.
    ``result.losses`` do not include it. Any stage may call it, several times; it does nothing in
    a ``forward_only`` step and outside rrfp, so that a module also runs by itself.

    Args:
        value: A tensor with one element, of any floating dtype.

    Raises:
        TypeError: Not a tensor.
        ValueError: More than one element; or gradients are disabled where it is called (in
            ``torch.no_grad()``, or in a reentrant checkpoint), so that it would be lost.
    """
    values = getattr(_forward, "values", None)
    if values is None:
        return
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"aux_loss got a {type(value).__name__}; pass a scalar tensor.")
    if value.numel() != 1:
        raise ValueError(
            f"aux_loss got a tensor of shape {tuple(value.shape)}; it must be a scalar. Reduce "
            "it, with .mean() or .sum()."
        )
    if not torch.is_grad_enabled():
        raise ValueError(
            "aux_loss was called where gradients are disabled (torch.no_grad, or a reentrant "
            "checkpoint), so its gradient would be lost. Call it outside, or pass "
            "use_reentrant=False to the checkpoint."
        )
    if value.requires_grad:
        values.append(value)


def call_collecting(module, args, kwargs):
    """(what the module returns, the auxiliary losses it added)."""
    outer = getattr(_forward, "values", None)
    values = _forward.values = []
    try:
        return module(*args, **kwargs), values
    finally:
        _forward.values = outer
