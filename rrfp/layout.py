"""The stages of a model, the edges between them, and the rank that each lives on."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from rrfp import _C
from rrfp.given_lists import is_list
from rrfp.tied import normalise_tied
from rrfp.value_text import nearest


@dataclass(frozen=True)
class Layout:
    """Stages 0..num_stages-1 on ranks 0..num_ranks-1.

    Attributes:
        edges: (source, target) pairs, ascending.
        loss_stages: Stages whose output goes into the loss function, ascending.
        tied: Groups of (stage, name) of parameters that count as one.
    """

    rank_of_stage: tuple
    num_ranks: int
    edges: tuple
    loss_stages: tuple
    tied: tuple = ()

    @property
    def num_stages(self):
        return len(self.rank_of_stage)

    @cached_property
    def source_stages(self):
        """Those that are fed with microbatches."""
        targets = {target for _, target in self.edges}
        return tuple(s for s in range(self.num_stages) if s not in targets)

    @property
    def has_one_stage_per_rank(self):
        return self.num_stages == self.num_ranks

    def stages_of(self, rank):
        return [stage for stage, owner in enumerate(self.rank_of_stage) if owner == rank]

    def sources_of(self, stage):
        return [source for source, target in self.edges if target == stage]

    def consumers_of(self, stage):
        return [target for source, target in self.edges if source == stage]

    def sends_away(self, stage):
        """Whether all its consumers are on other ranks."""
        ranks = self.rank_of_stage
        return all(ranks[target] != ranks[stage] for target in self.consumers_of(stage))

    @property
    def directed_edges(self):
        """(source rank, target rank) of every way a message takes, sorted."""
        pairs = {(self.rank_of_stage[a], self.rank_of_stage[b]) for a, b in self.edges}
        return sorted({(a, b) for x, y in pairs for a, b in ((x, y), (y, x)) if a != b})

    @cached_property
    def graph(self):
        return _C.StageGraph(self.num_ranks, list(self.rank_of_stage), list(self.edges),
                             list(self.loss_stages))


def make_layout(num_stages, num_ranks, placement, edges=None, loss_stages=None, tied=None):
    """The layout of ``num_stages`` stages on ``num_ranks`` ranks (None: as placement says).

    Raises:
        ValueError: A rank without a stage, a cycle, an edge or stage that does not exist, a stage
            that nobody needs or that stands in no edge and not in ``loss_stages``; by name.
        TypeError: Edges that are no pairs of ints, or loss stages that are no ints.
    """
    rank_of_stage, num_ranks = _place(num_stages, num_ranks, placement)
    edges = _normalise_edges(edges, num_stages)
    sources = {source for source, _ in edges}
    named = () if loss_stages is None else _stage_indices("loss_stages", loss_stages)
    if loss_stages is not None and not named:
        raise ValueError(
            "loss_stages is empty, so nothing would be trained; name every stage with a loss, or "
            "leave it at None for those whose output no stage takes."
        )
    if num_stages > 1:
        _refuse_stages_apart(num_stages, edges, named)
    if loss_stages is None:
        named = tuple(stage for stage in range(num_stages) if stage not in sources)
    layout = Layout(rank_of_stage, num_ranks, edges, named, normalise_tied(tied))
    try:
        _ = layout.graph
    except ValueError as error:
        also = "" if loss_stages is None else f" and loss_stages {list(named)}"
        raise ValueError(f"with edges {list(edges)}{also}, {error}.") from None
    return layout


def _place(num_stages, num_ranks, placement):
    """(rank of each stage, number of ranks)."""
    listed = None
    if not isinstance(placement, str) or placement not in ("loop", "v"):
        if isinstance(placement, str) or not isinstance(placement, Sequence):
            raise ValueError(
                f"placement is {placement!r}; use 'loop', 'v' or a list of ranks."
                + nearest(placement, ("loop", "v"))
            )
        listed = tuple(placement)
        if len(listed) != num_stages:
            raise ValueError(
                f"placement lists {len(listed)} ranks for {num_stages} stages; give one "
                "rank per stage."
            )
        for rank in listed:
            if not _is_index(rank):
                raise ValueError(f"placement is {placement!r}; {rank!r} is not a rank.")
        if num_ranks is None:
            num_ranks = max(listed) + 1
    num_ranks = num_stages if num_ranks is None else num_ranks
    if not isinstance(num_ranks, int) or num_ranks < 1:
        raise ValueError(f"num_ranks is {num_ranks!r}; it must be an int of at least 1.")
    if num_ranks > num_stages:
        raise ValueError(
            f"there are {num_stages} stages for num_ranks {num_ranks} (placement {placement!r}); "
            "a rank would have no stage. Split the model further or use fewer ranks."
        )
    if listed is None:
        period = num_ranks if placement == "loop" else 2 * num_ranks
        listed = tuple(min(s % period, 2 * num_ranks - 1 - s % period) for s in range(num_stages))
    if set(listed) != set(range(num_ranks)):
        raise ValueError(
            f"placement puts the stages on ranks {list(listed)}, but each of the ranks 0 to "
            f"{num_ranks - 1} must have one."
        )
    return listed, num_ranks


def _is_index(value):
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _stage_indices(name, stages):
    if not is_list(stages):
        raise TypeError(f"{name} is {stages!r}; pass a list of stage indices.")
    stages = list(stages)
    for stage in stages:
        if not _is_index(stage):
            raise TypeError(f"{name} lists {stage!r}; it must be the index of a stage.")
    return tuple(sorted(set(stages)))


def _normalise_edges(edges, num_stages):
    if edges is None:
        return tuple((s, s + 1) for s in range(num_stages - 1))
    if not is_list(edges):
        raise TypeError(f"edges is {edges!r}; pass a list of (source stage, target stage).")
    pairs = []
    for edge in edges:
        if not isinstance(edge, Sequence) or len(edge) != 2 or not all(map(_is_index, edge)):
            raise TypeError(f"edges lists {edge!r}; it must be (source stage, target stage).")
        pairs.append(tuple(edge))
    return tuple(sorted(pairs))


def _refuse_stages_apart(num_stages, edges, loss_stages):
    """A stage that an edge was forgotten for would be fed with microbatches and train a loss of
    its own, without a sign."""
    joined = {stage for edge in edges for stage in edge}
    for stage in range(num_stages):
        if stage not in joined and stage not in loss_stages:
            raise ValueError(
                f"stage {stage} stands in no edge of edges {list(edges)}, so it would be fed with "
                "microbatches and train a loss of its own. Add the edges that lead to it and from "
                "it; if it is meant to stand apart, name every stage with a loss in loss_stages, "
                f"{stage} among them."
            )


def stage_table(stages, default_stage=0):
    """``{stage_index: module}`` of the ``stages`` argument.

    Raises:
        TypeError: Something is not an ``nn.Module``, or an index is not an int.
        ValueError: No stage, or a negative index.
    """
    if isinstance(stages, torch.nn.Module) and not isinstance(
        stages, (torch.nn.ModuleList, torch.nn.ModuleDict)
    ):
        table = {default_stage: stages}
    elif isinstance(stages, (Mapping, torch.nn.ModuleDict)):
        table = dict(stages.items())
    elif isinstance(stages, (Sequence, torch.nn.ModuleList)) and not isinstance(stages, str):
        table = dict(enumerate(stages))
    else:
        raise TypeError(
            f"stages is a {type(stages).__name__}; pass a list of modules, "
            "{stage_index: module}, or one module."
        )
    if not table:
        raise ValueError("stages is empty; pass at least one stage.")
    for index, module in table.items():
        if not isinstance(index, int) or isinstance(index, bool):
            raise TypeError(f"stages names {index!r}; a stage index must be an int.")
        if index < 0:
            raise ValueError(f"stage index {index} is negative; stages count from 0.")
        if not isinstance(module, torch.nn.Module):
            raise TypeError(
                f"stages has a {type(module).__name__} as stage {index}; it must be an nn.Module."
            )
    return dict(sorted(table.items()))


def check_transport(transport, names):
    """Refuse a transport that is not one of ``names``.

    Raises:
        ValueError: Names the choices.
    """
    if not isinstance(transport, str) or transport not in names:
        raise ValueError(
            f"transport is {transport!r}; here this version has {' and '.join(names)}."
            + nearest(transport, names)
        )


def check_modules(table):
    """Refuse what one process can see to be wrong with its stages.

    Raises:
        ValueError: A module or parameter in two stages, or one that has no shape yet.
    """
    stage_of_module = {}
    for stage, module in table.items():
        other = stage_of_module.setdefault(id(module), stage)
        if other != stage:
            raise ValueError(
                f"stages holds one module twice, as stage {other} and as stage {stage}; give "
                "each stage its own."
            )
    owner = {}
    for stage, module in table.items():
        for name, parameter in module.named_parameters():
            if torch.nn.parameter.is_lazy(parameter):
                raise ValueError(
                    f"parameter {name} of stage {stage} is lazy and has no shape yet. Run the "
                    "stage once on an input, without gradients, before it is given to rrfp."
                )
            other = owner.setdefault(id(parameter), (stage, name))
            if other[0] != stage:
                raise ValueError(
                    f"parameter {name} of stage {stage} is also {other[1]} of stage {other[0]}; "
                    f"stages run side by side and cannot share one. Give each its own copy, and "
                    f"pass tied=[({other[0]}, {other[1]!r}), ({stage}, {name!r})] to train them "
                    "as one."
                )


def check_stages_complete(stages_of_rank):
    """Refuse stages that are missing or on two ranks. ``stages_of_rank[r]``: indices, by rank.

    Raises:
        ValueError: Names the stage and the ranks.
    """
    owner = {}
    for rank, stages in enumerate(stages_of_rank):
        for stage in stages:
            if stage in owner:
                raise ValueError(
                    f"stage {stage} is on rank {owner[stage]} and on rank {rank}; each stage "
                    "belongs to exactly one rank. Ranks that hold copies of it belong to several "
                    "pipelines, each with a process group of its own as group=."
                )
            owner[stage] = rank
    missing = next((s for s in range(len(owner)) if s not in owner), None)
    if missing is not None:
        listed = "; ".join(f"rank {r} has {list(s)}" for r, s in enumerate(stages_of_rank))
        raise ValueError(
            f"stage {missing} is missing ({listed}); stages count from 0, and where there are "
            "fewer ranks than stages a rank passes several, {stage_index: module, ...}."
        )
