"""Stages that have moved to another device since their pipeline was set up.

Which way messages take, and on which streams tasks run, was settled then by the devices.
"""


class StagesMoved(ValueError):
    """A pipeline cannot run its stages where they are now; nothing ran, on any rank."""


def _device_now(module):
    """The device of the module's first tensor; None without tensors. The rest moves with it."""
    for tensors in (module.parameters(), module.buffers()):
        for tensor in tensors:
            return tensor.device
    return None


def moved_stages(modules, devices):
    """``[(stage, where it was, where it is)]`` of ``{stage: module}``.

    ``devices`` is ``{stage: device}`` at set-up, None for the CPU.
    """
    moved = []
    for stage, module in modules.items():
        now = _device_now(module)
        was = "cpu" if devices is None else str(devices[stage])
        if now is not None and str(now) != was:
            moved.append((stage, was, str(now)))
    return moved


def check_not_moved(views):
    """Refuse a step of moved stages.

    Raises:
        StagesMoved: Names the stage and both devices.
    """
    for view in views:
        for stage, was, now in view["moved"]:
            raise StagesMoved(
                f"stage {stage} was on {was} when this pipeline was set up and is on {now} now. "
                "Build a new Pipeline after moving stages; run_pipeline does so by itself, but "
                "for agreement groups."
            )
