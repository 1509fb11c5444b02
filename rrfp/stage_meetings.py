"""Stages whose ranks meet others in collectives inside a task, as their modules show it."""

import sys

import torch

NO_MEETINGS = "none"  # agreement_group: the caller says that no collective runs inside a task


def _mesh_ranks(mesh):
    return tuple(sorted(mesh.mesh.flatten().tolist()))


def _held_ranks(value):
    """The global ranks of a process group or DeviceMesh that an attribute holds, else ()."""
    dist = torch.distributed
    if isinstance(value, dist.device_mesh.DeviceMesh):
        return _mesh_ranks(value)
    if isinstance(value, dist.ProcessGroup) and dist.get_rank(value) >= 0:
        return tuple(sorted(dist.get_process_group_ranks(value)))
    return ()


def _meetings_of(module):
    """(what, global ranks, whether it is certain) of what in ``module`` may run a collective."""
    dist = torch.distributed
    named = [*module.named_parameters(), *module.named_buffers()]
    for name, tensor in named:
        mesh = getattr(tensor, "device_mesh", None)
        if mesh is not None:
            yield f"{name} is a DTensor", _mesh_ranks(mesh), True
    for name, part in module.named_modules():
        path = f"{name}." if name else ""
        if isinstance(part, torch.nn.SyncBatchNorm) and part.process_group is None:
            world = tuple(range(dist.get_world_size()))
            yield f"{name or 'it'} is a SyncBatchNorm", world, True
        for attribute, value in vars(part).items():
            ranks = _held_ranks(value)
            if ranks:
                yield f"{path}{attribute} is a {type(value).__name__}", ranks, False


def check_meetings(modules, pipeline_ranks, agreement_ranks, in_one_process=False):
    """Refuse stages that meet ranks in tasks without agreeing with them on an order.

    Args:
        modules: ``{stage: module}`` of this process.
        pipeline_ranks: Global ranks of the pipeline; a group among them that a module merely
            holds is no meeting inside a task.
        agreement_ranks: Global ranks of this rank's agreement group, () for none.

    Raises:
        ValueError: Names the stage, what in it meets whom, and what to do.
    """
    dist = torch.distributed
    if not (dist.is_available() and dist.is_initialized()):
        return
    for stage, module in modules.items():
        for what, ranks, is_certain in _meetings_of(module):
            if len(ranks) < 2 or set(ranks) <= set(agreement_ranks):
                continue
            if not is_certain and set(ranks) <= set(pipeline_ranks):
                continue
            raise ValueError(_refusal(stage, what, ranks, agreement_ranks, in_one_process))


def refuse_wrappers(modules):
    """Refuse data-parallel wrappers that take a forward and a backward for a whole step.

    Args:
        modules: ``{stage: module}`` of this process.

    Raises:
        ValueError: Names the stage, the wrapper, what would go wrong and what to do.
    """
    sharded = getattr(sys.modules.get("torch.distributed.fsdp"), "FullyShardedDataParallel", ())
    for stage, module in modules.items():
        for name, part in module.named_modules():
            where = f"{name} of stage {stage}" if name else f"stage {stage}"
            if isinstance(part, torch.nn.parallel.DistributedDataParallel):
                raise ValueError(
                    f"{where} is wrapped in DistributedDataParallel, which averages gradients in "
                    "the first backward after a forward. A step has a backward for every "
                    "microbatch, with forwards in between, and most would stay one replica's own "
                    "without a sign. Pass the module inside (.module) and all-reduce its "
                    "gradients over the replicas after the step: docs/data_parallel.md."
                )
            if isinstance(part, sharded):
                raise ValueError(
                    f"{where} is wrapped in FullyShardedDataParallel, which frees parameters "
                    "after the backward of one microbatch that others in flight still need. Use "
                    "torch's fully_shard on it and pass the ranks that share it as "
                    "agreement_group: docs/data_parallel.md."
                )


def _refusal(stage, what, ranks, agreement_ranks, in_one_process):
    if in_one_process:
        remedy = "run one process per rank and pass agreement_group"
    elif agreement_ranks:
        remedy = f"agreement_group has the ranks {list(agreement_ranks)} only; give it all of them"
    else:
        remedy = 'pass them as agreement_group ("auto" with a DeviceMesh as group)'
    return (
        f"stage {stage} meets other ranks in collectives inside its tasks: {what} over the global "
        f"ranks {list(ranks)}. Ranks that run tasks in orders of their own would wait for one "
        f"another for ever or mix up microbatches: {remedy}. Where its collectives run outside "
        f'the tasks, or every step has slack=0, say so with agreement_group="{NO_MEETINGS}".'
    )
