"""Limits in bytes, as all ranks of a step agree on them."""

from rrfp import _C
from rrfp.activations import foretold
from rrfp.report import size_text


def byte_limits(request, views, layout, num_microbatches, costs):
    """(limit in bytes per rank, sizes per stage and microbatch) for a Decision.

    A rank counts bytes once the sizes of all its stages are known: given, or measured in an
    earlier step. Until then it counts microbatches.

    Raises:
        ValueError: Ranks disagree on a size, or a limit is below what one microbatch takes.
    """
    if not request.in_flight.num_bytes or request.forward_only:
        return (), ()
    given = _given(views, num_microbatches)
    measured = {}
    for view in views:
        if view["held"] is not None:
            measured.update(view["held"])
        elif len(given) < layout.num_stages:
            raise ValueError(
                "max_in_flight is in bytes, which members of an agreement group cannot measure "
                "alike; pass activation_bytes for every stage."
            )
    limits, sizes = [], [()] * layout.num_stages
    for rank, limit in enumerate(request.in_flight.num_bytes):
        stages = layout.stages_of(rank)
        if limit is None or not all(stage in given or stage in measured for stage in stages):
            limits.append(_C.UNLIMITED)
            continue
        limits.append(limit)
        for stage in stages:
            sizes[stage] = given.get(stage) or foretold(measured[stage], num_microbatches, costs)
        if all(stage in given for stage in stages):
            _check_room(rank, limit, [given[stage] for stage in stages])
    return tuple(limits), tuple(sizes)


def _given(views, num_microbatches):
    """``{stage: sizes}`` of what the ranks gave as ``activation_bytes``."""
    given, giver = {}, {}
    for rank, view in enumerate(views):
        for stage, sizes in view["activation_bytes"].items():
            sizes = (tuple(sizes) if isinstance(sizes, list) else (sizes,) * num_microbatches)
            if given.setdefault(stage, sizes) != sizes:
                raise ValueError(
                    f"the ranks disagree on activation_bytes of stage {stage}: rank "
                    f"{giver[stage]} has {list(given[stage])}, rank {rank} has {list(sizes)}. Pass "
                    "the same values, or on one rank only."
                )
            giver.setdefault(stage, rank)
    return given


def _check_room(rank, limit, sizes_of_stage):
    for microbatch, sizes in enumerate(zip(*sizes_of_stage)):
        if sum(sizes) > limit:
            raise ValueError(
                f"max_in_flight is {size_text(limit)} for rank {rank}, but by activation_bytes "
                f"microbatch {microbatch} alone takes {size_text(sum(sizes))} there; raise the "
                "limit, or make the microbatches smaller."
            )
