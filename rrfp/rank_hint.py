"""A hint that is a function of the caller's: it gives every task of the step a number."""

import math
from dataclasses import dataclass

from rrfp.tasks import Task, TaskKind

# Where two tasks have the same number.
_KINDS = ("B", "I", "F", "W")


@dataclass(frozen=True)
class HintState:
    """What a callable hint is told about the step whose tasks it ranks.

    Attributes:
        step: How many steps this pipeline has run before, as random numbers count them.
        num_microbatches, num_stages, num_ranks: Of the step.
        rank_of_stage: By stage, the rank it lives on.
        edges: (source stage, target stage) pairs.
        loss_stages: Stages whose output goes into a loss.
        costs: One number per microbatch as given to the step; None if none were.
        split_backward: Whether backwards are tasks I and W, in the place of B.
        forward_only: Whether there are forwards alone.
    """

    step: int
    num_microbatches: int
    num_stages: int
    num_ranks: int
    rank_of_stage: tuple
    edges: tuple
    loss_stages: tuple
    costs: tuple | None
    split_backward: bool
    forward_only: bool


def state_of(request, layout, step, num_microbatches, costs):
    """The HintState of a step that is about to be decided."""
    return HintState(
        step=step,
        num_microbatches=num_microbatches,
        num_stages=layout.num_stages,
        num_ranks=layout.num_ranks,
        rank_of_stage=tuple(layout.rank_of_stage),
        edges=layout.edges,
        loss_stages=layout.loss_stages,
        costs=None if costs is None else tuple(costs),
        split_backward=request.split_backward,
        forward_only=request.forward_only,
    )


def order_by(rank, state):
    """Texts of all tasks of the step, those first to which ``rank(task, state)`` gives least.

    Raises:
        ValueError: It raised, or answered nan.
        TypeError: It answered something that is no number.
    """
    kinds = "F" if state.forward_only else "FIW" if state.split_backward else "FB"
    tasks = [
        Task(stage, TaskKind(kind), microbatch)
        for kind in kinds
        for stage in range(state.num_stages)
        for microbatch in range(state.num_microbatches)
    ]
    depth = _depths(state)
    numbered = [
        (_number(rank, task, state), task.microbatch, _KINDS.index(task.kind.value),
         depth[task.stage] if task.kind == "F" else -depth[task.stage])
        for task in tasks
    ]
    by_number = sorted(range(len(tasks)), key=numbered.__getitem__)
    return tuple(str(tasks[index]) for index in by_number)


def _depths(state):
    """By stage, how many edges lead to it at most: results flow from lower to higher."""
    depth = [0] * state.num_stages
    for _ in range(state.num_stages):  # edges may be listed against the flow
        for source, target in state.edges:
            depth[target] = max(depth[target], depth[source] + 1)
    return depth


def _number(rank, task, state):
    try:
        answer = value = rank(task, state)
    except Exception as error:
        remedy = "A callable hint is called as hint(task, state) and returns a number."
        if state.costs is None and "NoneType" in str(error):
            remedy = (
                "This step was given no costs, so state.costs is None: pass costs, one number per "
                "microbatch, on any rank, or rank without them."
            )
        raise ValueError(
            f"hint raised {type(error).__name__} for task {task}: {error}. {remedy}"
        ) from error
    try:
        if not isinstance(value, int):  # a NumPy scalar, say; an int may be larger than a float
            value = float(value) if hasattr(value, "__float__") else None
    except (TypeError, ValueError, RuntimeError):  # a tensor of several elements
        value = None
    if value is None:
        raise TypeError(
            f"hint returned {answer!r}, a {type(answer).__name__}, for task {task}; it must be a "
            "number."
        )
    if isinstance(value, float) and math.isnan(value):
        raise ValueError(f"hint returned nan for task {task}; it must be a number.")
    return value
