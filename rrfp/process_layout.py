"""Which rank has which stages, on which devices: judged alike by all ranks, from their cards."""

from rrfp.device import place_on_gpus
from rrfp.layout import check_stages_complete, make_layout
from rrfp.rank_cards import check_cards
from rrfp.tied import check_holders


def lay_out(cards, member, shape, transport):
    """(layout, device of each stage or None) by all ranks' cards; every rank fails alike."""
    check_cards(cards, shape)
    stages_of_rank = [card["stages"] for card in cards]
    check_stages_complete(stages_of_rank)
    layout = make_layout(sum(map(len, stages_of_rank)), member.num_ranks, **shape)
    _check_placement(stages_of_rank, layout)
    devices = place_on_gpus(layout, {s: d for c in cards for s, d in c["devices"].items()})
    _check_channel(transport, devices)
    described = {h: facts for card in cards for h, facts in card["tied parameters"].items()}
    check_holders(layout.tied, described, layout.num_stages)
    return layout, devices


def _check_channel(transport, devices):
    if devices is None and transport in ("ipc", "nccl"):
        raise ValueError(
            f"transport is {transport!r}, which joins GPUs, but all stages are on the CPU; use "
            "'auto', 'socket' or 'tcp'."
        )
    if devices is not None and transport in ("socket", "tcp"):
        raise ValueError(
            f"transport is {transport!r}, which carries CPU tensors, but the stages are on GPUs; "
            "use 'auto', 'ipc' or 'nccl'."
        )


def _check_placement(stages_of_rank, layout):
    owner = {stage: rank for rank, stages in enumerate(stages_of_rank) for stage in stages}
    owners = [owner[stage] for stage in range(layout.num_stages)]
    for rank, stages in enumerate(stages_of_rank):
        if stages != layout.stages_of(rank):
            raise ValueError(
                f"rank {rank} has stages {stages}, but the placement puts stages "
                f"{layout.stages_of(rank)} there; pass those, or placement={owners}."
            )
