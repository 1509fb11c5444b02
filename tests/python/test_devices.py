"""Which GPU a rank is on, by its stages' devices; no GPU is needed to say so."""

import pytest
import torch

from rrfp.device import devices_by_rank, place_on_gpus, refuse_shared_draws
from rrfp.layout import make_layout

ONE, TWO = torch.device("cuda:0"), torch.device("cuda:1")


def test_a_stage_without_tensors_is_where_its_rank_is():
    layout = make_layout(6, 2, "v")
    devices = {0: "cuda:0", 1: "cuda:1", 2: TWO, 3: None, 4: None, 5: None}
    placed = place_on_gpus(layout, devices)
    assert placed == {0: ONE, 1: TWO, 2: TWO, 3: ONE, 4: ONE, 5: TWO}
    assert devices_by_rank(layout, placed) == [ONE, TWO]


def test_stages_on_the_cpu_have_no_gpu():
    layout = make_layout(2, 2, "loop")
    assert place_on_gpus(layout, {0: torch.device("cpu"), 1: None}) is None
    assert place_on_gpus(layout, {0: None, 1: None}) is None


def test_two_gpus_on_a_rank_are_refused():
    layout = make_layout(4, 2, "loop")
    devices = {0: ONE, 1: TWO, 2: TWO, 3: TWO}
    with pytest.raises(ValueError, match="rank 0 has stage 0 on cuda:0 and stage 2 on cuda:1"):
        place_on_gpus(layout, devices)


def test_dropout_is_refused_where_another_rank_shares_the_gpu():
    modules = {
        stage: torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout(0.5))
        for stage in range(4)
    }
    apart = {0: ONE, 1: TWO, 2: ONE, 3: TWO}
    refuse_shared_draws(modules, (0, 1, 0, 1), apart)  # two stages of one rank may share
    with pytest.raises(ValueError, match="stage 0 drops out at random and shares cuda:0"):
        refuse_shared_draws(modules, (0, 1, 0, 1), dict.fromkeys(range(4), ONE))
