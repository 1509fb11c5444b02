"""What is done to gradients between a step and the optimizer's: over all ranks of the pipeline.

Every rank of the group must call these, also one that has no gradients. They block until all do,
as any collective of torch.distributed. In one process they are torch's own.
"""

import torch

from rrfp.tied import is_later_copy


def _reduce(value, operation, group):
    """``value`` (a scalar on the CPU) all-reduced over the group; as it is in one process."""
    dist = torch.distributed
    if not (dist.is_available() and dist.is_initialized()):
        return value
    if dist.get_rank(group) < 0:
        raise ValueError("this process is not a member of group; only members may call this.")
    device = "cuda" if dist.get_backend(group) == "nccl" else "cpu"
    value = value.to(device)
    dist.all_reduce(value, operation, group=group)
    return value.cpu()


def _in_full(gradient):
    """The values of a gradient in double precision."""
    values = gradient if gradient.layout is torch.strided else gradient.coalesce().values()
    return values.to(torch.complex128 if values.is_complex() else torch.float64)


@torch.no_grad()
def clip_grad_norm_(parameters, max_norm, norm_type=2.0, error_if_nonfinite=False, group=None):
    """Scale the gradients of all ranks so that their common norm is at most ``max_norm``.

    As ``torch.nn.utils.clip_grad_norm_`` over the parameters of all ranks together. A parameter
    that is given twice counts once, and so do tied ones: at the first stage that holds them.

    Args:
        parameters: A tensor or an iterable of tensors, those of this rank's stages.
        max_norm: The norm not to be exceeded.
        norm_type: 2 by default; ``float("inf")`` for the largest absolute value.
        error_if_nonfinite: Raise where the norm is inf or nan, on every rank.
        group: The process group of the pipeline. Default: the world.

    Returns:
        The norm before clipping, a float64 scalar on the CPU, the same on every rank.

    Raises:
        ValueError: ``max_norm`` or ``norm_type`` is not positive; nothing was changed.
        RuntimeError: The norm is not finite, with ``error_if_nonfinite``; nothing was changed.
    """
    max_norm, norm_type = float(max_norm), float(norm_type)
    if not max_norm >= 0 or not norm_type > 0:
        raise ValueError(
            f"max_norm is {max_norm} and norm_type {norm_type}; max_norm must be at least 0 and "
            "norm_type greater than 0."
        )
    if isinstance(parameters, torch.Tensor):
        parameters = [parameters]
    unique = {id(p): p for p in parameters}.values()
    gradients = [p.grad for p in unique if p.grad is not None]
    counted = [p.grad for p in unique if p.grad is not None and not is_later_copy(p)]
    norms = [torch.linalg.vector_norm(_in_full(g), norm_type).cpu() for g in counted]
    # Of a sharded gradient the whole one counts, which its ranks add up.
    norms = [norm.full_tensor() if hasattr(norm, "full_tensor") else norm for norm in norms]
    if norm_type == float("inf"):
        own = torch.stack(norms).amax() if norms else torch.zeros((), dtype=torch.float64)
        total = _reduce(own, torch.distributed.ReduceOp.MAX, group)
    else:
        own = sum((norm**norm_type for norm in norms), torch.zeros((), dtype=torch.float64))
        total = _reduce(own, torch.distributed.ReduceOp.SUM, group) ** (1 / norm_type)
    if error_if_nonfinite and not torch.isfinite(total):
        raise RuntimeError(
            f"the norm of the gradients of all ranks is {total.item()}; they are unchanged. Skip "
            "the step, or find out where it comes from with torch.autograd.detect_anomaly()."
        )
    # The constant is torch's: it keeps a norm of 0 from dividing.
    factor = max_norm / (total.item() + 1e-6)
    if not factor >= 1.0:  # also nan, which then shows in every gradient
        for gradient in gradients:
            gradient.mul_(factor)
    return total


class GradScaler(torch.amp.GradScaler):
    """``torch.amp.GradScaler`` whose ranks skip a step together.

    Where one rank finds an inf or nan, all skip the optimizer step and lower the scale. Pass
    ``grad_scale=scaler.get_scale()`` to the step, then call ``unscale_`` (only to look at the
    gradients), ``step`` and ``update`` on every rank.

    Args:
        device: Of the parameters: ``"cpu"`` or ``"cuda"``.
        group: The process group of the pipeline; where pipelines share agreement groups, one of
            all their ranks. Default: the world.
        options: Those of ``torch.amp.GradScaler``.
    """

    def __init__(self, device="cpu", group=None, **options):
        super().__init__(device, **options)
        self._pipeline_group = group
        if self.is_enabled():
            self.scale(torch.zeros((), device=device))  # torch makes the scale at the first use

    def unscale_(self, optimizer):
        """Divide the optimizer's gradients by the scale; blocks until every rank does."""
        super().unscale_(optimizer)
        if not self.is_enabled():
            return
        found = self._found_inf_per_device(optimizer)
        own = sum((value.detach().cpu() for value in found.values()), torch.zeros(()))
        total = _reduce(own, torch.distributed.ReduceOp.MAX, self._pipeline_group)
        for value in found.values():
            value.fill_(float(total.item() > 0))
