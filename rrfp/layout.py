"""Which stage lives on which rank. This version runs chains with one stage per rank."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from rrfp import _C

_ONE_STAGE = "several stages per rank are not supported yet; use one stage per rank"


@dataclass(frozen=True)
class Layout:
    """The stages 0..num_stages-1 of a chain on ranks 0..num_ranks-1."""

    rank_of_stage: tuple

    @property
    def num_stages(self):
        return len(self.rank_of_stage)

    @property
    def num_ranks(self):
        return len(self.rank_of_stage)

    @property
    def loss_stage(self):
        return self.num_stages - 1

    @property
    def loss_rank(self):
        return self.rank_of_stage[-1]

    @property
    def source_rank(self):
        return self.rank_of_stage[0]

    def stage_of(self, rank):
        return self.rank_of_stage.index(rank)

    @property
    def directed_edges(self):
        """(source rank, target rank) of every way a message takes, sorted."""
        ranks = self.rank_of_stage
        pairs = {(a, b) for a, b in zip(ranks, ranks[1:]) if a != b}
        return sorted(pairs | {(b, a) for a, b in pairs})

    def graph(self):
        edges = [(s, s + 1) for s in range(self.num_stages - 1)]
        return _C.StageGraph(self.num_ranks, list(self.rank_of_stage), edges, [self.loss_stage])


def make_layout(num_stages, num_ranks, placement):
    """The layout of ``num_stages`` stages on ``num_ranks`` ranks (None: as placement says).

    Raises:
        ValueError: A placement or number of ranks that this version does not run.
    """
    if placement in ("loop", "v"):
        rank_of_stage = tuple(range(num_stages))
    elif isinstance(placement, str) or not isinstance(placement, Sequence):
        raise ValueError(f"placement is {placement!r}; use 'loop', 'v' or a list of ranks.")
    else:
        rank_of_stage = tuple(placement)
        if len(rank_of_stage) != num_stages:
            raise ValueError(
                f"placement lists {len(rank_of_stage)} ranks for {num_stages} stages; give one "
                "rank per stage."
            )
        for rank in rank_of_stage:
            if not isinstance(rank, int) or rank < 0:
                raise ValueError(f"placement is {placement!r}; {rank!r} is not a rank.")
        if num_ranks is None:
            num_ranks = max(rank_of_stage) + 1
    num_ranks = num_stages if num_ranks is None else num_ranks
    if not isinstance(num_ranks, int) or num_ranks < 1:
        raise ValueError(f"num_ranks is {num_ranks!r}; it must be an int of at least 1.")
    if num_ranks < num_stages:
        raise ValueError(
            f"there are {num_stages} stages for num_ranks {num_ranks} (placement "
            f"{placement!r}), but {_ONE_STAGE}."
        )
    if num_ranks > num_stages:
        raise ValueError(
            f"there are {num_stages} stages for num_ranks {num_ranks} (placement {placement!r}); "
            "a rank would have no stage. Split the model further or use fewer ranks."
        )
    if sorted(rank_of_stage) != list(range(num_ranks)):
        raise ValueError(f"placement is {list(rank_of_stage)}, but {_ONE_STAGE}.")
    if rank_of_stage != tuple(range(num_stages)):
        raise ValueError(
            f"placement is {list(rank_of_stage)}; stages in another order than the ranks are not "
            "supported yet: stage s must be on rank s."
        )
    return Layout(rank_of_stage)


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
    if transport not in names:
        raise ValueError(
            f"transport is {transport!r}; here this version has {' and '.join(names)}."
        )


def check_modules(table):
    """Refuse what one process can see to be wrong with its stages.

    Raises:
        ValueError: A module or parameter in two stages.
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
            other = owner.setdefault(id(parameter), (stage, name))
            if other[0] != stage:
                raise ValueError(
                    f"parameter {name} of stage {stage} is also {other[1]} of stage {other[0]}; "
                    "parameters shared between stages are not supported yet. Give each stage "
                    "its own."
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
                    "belongs to exactly one rank."
                )
            owner[stage] = rank
    missing = [s for s in range(max(owner) + 1) if s not in owner]
    if missing:
        listed = "; ".join(f"rank {r} has {list(s)}" for r, s in enumerate(stages_of_rank))
        raise ValueError(f"stage {missing[0]} is missing ({listed}); stages count from 0.")
