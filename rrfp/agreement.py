"""What the ranks of a step agree on: one decision out of every rank's view."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from rrfp import _C
from rrfp.byte_limits import byte_limits
from rrfp.given_lists import drawn, microbatch_places
from rrfp.moved_stages import check_not_moved
from rrfp.rank_hint import order_by, state_of
from rrfp.settings import SETTINGS
from rrfp.tied import check_drift
from rrfp.value_text import nearest


@dataclass(frozen=True)
class Decision:
    """The same on every rank.

    Attributes:
        microbatch_order: Microbatches by place; empty for the caller's order.
        limits: Units per rank, 0 for the hint's default; empty: everywhere.
        limits_bytes: Bytes per rank in their place, ``_C.UNLIMITED`` for units; empty: all units.
        activation_bytes: By stage, the bytes of each microbatch; of ranks that count units, none.
        weights: Per microbatch, what its loss counts.
        weight_in_order: W (unsplit: B) in the step's order; so are the F and the I of the stages
            in ``forward_in_order`` and ``input_in_order``.
        waiting: Whether hint "auto" may wait for an announced task.
        seed: Of the random numbers of all tasks.
        costs: Of the microbatches; empty if not known.
        gathers_times: The guard wants to know at the end of the step what its tasks took.
    """

    num_microbatches: int
    hint: str
    order: tuple
    slack: int
    limits: tuple
    microbatch_order: tuple
    weights: tuple
    forward_only: bool
    split_backward: bool
    weight_in_order: bool
    forward_in_order: tuple
    input_in_order: tuple
    waiting: bool
    seed: int = field(compare=False)  # plans are the same for every seed
    limits_bytes: tuple = ()
    activation_bytes: tuple = ()
    costs: tuple = field(default=(), compare=False)
    gathers_times: bool = field(default=False, compare=False)

    def plan(self, layout, waiting=True):
        """The plan of the step; without ``waiting`` no rank idles for a task it prefers.

        Raises:
            ValueError: An order or limit that cannot be run, by name.
        """
        return _C.StepPlan(
            layout.graph,
            self.num_microbatches,
            list(self.microbatch_order),
            self.hint,
            list(self.order),
            self.slack,
            list(self.limits),
            self.forward_only,
            self.split_backward,
            self.weight_in_order,
            forward_in_order=list(self.forward_in_order),
            input_in_order=list(self.input_in_order),
            waiting=self.waiting and waiting,
            limits_bytes=list(self.limits_bytes),
            activation_bytes=[list(sizes) for sizes in self.activation_bytes],
        )


def decide(request, views, layout):
    """The decision for a step. ``views[r]`` is rank r's view, or one view of all ranks.

    ``request`` is the deciding rank's own, whose options the views are known to share.

    Raises:
        ValueError: Ranks disagree, or a length, limit or order is wrong; names the values.
        StagesMoved: A stage is on another device than at set-up.
    """
    check_not_moved(views)
    _check_same_options(views)
    _check_stage_kwargs(views, layout)
    num_microbatches = _agree_on_microbatches(views, layout, request.launch_note)
    costs = _agree_on_costs(views)
    _check_same_counter(views)
    check_drift(layout.tied, views)
    traits = {stage: seen for view in views for stage, seen in sorted(view["traits"].items())}
    is_ordered = request.deterministic
    limits_bytes, activation_bytes = byte_limits(request, views, layout, num_microbatches, costs)
    hint, order = request.hint, tuple(request.order)
    if callable(hint):
        state = state_of(request, layout, views[0]["counter"], num_microbatches, costs)
        hint, order = "order", order_by(hint, state)
    return Decision(
        num_microbatches=num_microbatches,
        hint=hint,
        order=order,
        slack=request.slack,
        limits=request.in_flight.units,
        limits_bytes=limits_bytes,
        activation_bytes=activation_bytes,
        microbatch_order=_microbatch_order(request, costs, num_microbatches),
        weights=_weights(request.loss_reduction, num_microbatches),
        forward_only=request.forward_only,
        split_backward=request.split_backward,
        weight_in_order=is_ordered,
        forward_in_order=tuple(s for s, t in traits.items() if is_ordered and t.changes_buffers),
        input_in_order=tuple(s for s, t in traits.items() if is_ordered and t.is_fused),
        waiting=SETTINGS.waiting,
        seed=torch.initial_seed() if request.seed is None else request.seed,
        costs=tuple(costs or ()),
    )


def _check_stage_kwargs(views, layout):
    """Each rank may give all of them, but the rank that runs the stage is the one they are for."""
    if len(views) < layout.num_ranks:
        return  # one view of all ranks
    for stage, owner in enumerate(layout.rank_of_stage):
        name = f"stage_kwargs[{stage}]"
        for rank, view in enumerate(views):
            if name in view["lengths"] and name not in views[owner]["lengths"]:
                raise ValueError(
                    f"{name} is given on rank {rank} and not on rank {owner}, which runs stage "
                    f"{stage} and alone would use it. Pass it on rank {owner}, or on every rank."
                )


def _check_same_counter(views):
    for rank, view in enumerate(views[1:], start=1):
        if view["counter"] != views[0]["counter"]:
            raise ValueError(
                f"the ranks disagree on how many steps have run: rank 0 counts "
                f"{views[0]['counter']}, rank {rank} {view['counter']}. Call load_state_dict() "
                "with the same state on every rank, or on none."
            )


def _check_same_options(views):
    for name, value in views[0]["options"].items():
        for rank, view in enumerate(views[1:], start=1):
            if view["options"][name] != value:
                raise ValueError(
                    f"the ranks disagree on {name}: rank 0 has {value!r}, rank {rank} has "
                    f"{view['options'][name]!r}. Pass the same value on every rank."
                )


def _agree_on_microbatches(views, layout, launch_note):
    rank_of = [0] * layout.num_stages if len(views) == 1 else layout.rank_of_stage
    sources = layout.source_stages
    is_one = len(sources) == 1
    for rank, view in enumerate(views):
        for stage in view["sources"]:
            if rank_of[stage] != rank:
                given = [r for r, other in enumerate(views) if stage in other["sources"]]
                owner = rank_of[stage]
                also = f" as well as on rank {owner}" if owner in given else ""
                what = "the source stage" if is_one else f"source stage {stage}"
                raise ValueError(
                    f"microbatches is given on rank {rank}{also}; only rank {owner} owns {what}, "
                    "pass None elsewhere."
                )
    missing = [stage for stage in sources if stage not in views[rank_of[stage]]["sources"]]
    if missing and len(views) == 1:
        raise ValueError(
            f"microbatches is None for stage {missing[0]}, a source stage; pass one input per "
            f"microbatch.{launch_note}"
        )
    if missing == list(sources) and is_one:
        raise ValueError(
            f"microbatches is None on every rank; pass it on rank {rank_of[missing[0]]}, which "
            f"owns stage {missing[0]}."
        )
    if missing:
        raise ValueError(
            f"microbatches is None for stage {missing[0]}, a source stage; pass it on rank "
            f"{rank_of[missing[0]]}, which owns it. The source stages are "
            f"{', '.join(map(str, sources))}."
        )
    source = rank_of[sources[0]]
    first = "microbatches" if is_one else f"microbatches[{sources[0]}]"
    num_microbatches = views[source]["lengths"][first]
    for rank, view in enumerate(views):
        for name, length in view["lengths"].items():
            if length != num_microbatches:
                what = "is" if name == "num_microbatches" else "has length"
                raise ValueError(
                    f"{name} {what} {length} on rank {rank}, but {first} has length "
                    f"{num_microbatches} on rank {source}. Pass one item per microbatch."
                )
    return num_microbatches


def _agree_on_costs(views):
    given = [(rank, view["costs"]) for rank, view in enumerate(views) if view["costs"] is not None]
    for rank, costs in given[1:]:
        if costs != given[0][1]:
            raise ValueError(
                f"the ranks disagree on costs: rank {given[0][0]} has {given[0][1]}, rank {rank} "
                f"has {costs}. Pass the same values, or on one rank only."
            )
    return given[0][1] if given else None


def mid_order(costs):
    """Microbatches with the shortest first and last and the longest in the middle."""
    by_cost = sorted(range(len(costs)), key=lambda m: (costs[m], m))
    return by_cost[0::2] + by_cost[1::2][::-1]


def _microbatch_order(request, costs, num_microbatches):
    order = request.microbatch_order
    if isinstance(order, str) and order == "given":
        return ()
    if request.names_microbatches:
        kind = "an order of tasks" if request.order else "a callable that ranks tasks"
        raise ValueError(
            f"hint is {kind}, which names microbatches as they were given; it requires "
            "microbatch_order='given'."
        )
    if isinstance(order, str):
        if order != "mid":
            raise ValueError(
                f"microbatch_order is {order!r}; use 'given', 'mid', a list or a callable."
                + nearest(order, ("given", "mid"))
            )
        if costs is None:
            raise ValueError(
                "microbatch_order is 'mid', which ranks microbatches by costs; pass costs, one "
                "number per microbatch, on any rank."
            )
        return tuple(mid_order(costs))
    if callable(order):
        if costs is None:
            raise ValueError("microbatch_order is a callable of costs; pass costs on any rank.")
        try:
            order = order(list(costs))
            order = drawn("microbatch_order", order) if isinstance(order, Iterator) else order
        except Exception as error:
            raise ValueError(
                f"microbatch_order raised {type(error).__name__}: {error}. A callable one is "
                "called as microbatch_order(costs) and returns the microbatches in order."
            ) from error
    order = microbatch_places(order)
    if sorted(order) != list(range(num_microbatches)):
        raise ValueError(
            f"microbatch_order is {order}; it must name each of 0 to {num_microbatches - 1} "
            "exactly once."
        )
    return tuple(order)


def _weights(loss_reduction, num_microbatches):
    if loss_reduction == "mean":
        return (1.0 / num_microbatches,) * num_microbatches
    if loss_reduction == "sum":
        return (1.0,) * num_microbatches
    return tuple(loss_reduction)
