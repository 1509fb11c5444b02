"""The report of a step: its parts, and the sentence on inputs in transfer.

Would catch: a part that the table or the sum leaves out, a sentence for what costs next to
nothing, the wrong rank named first.
"""

import dataclasses

import pytest
import torch
from torch import nn

import rrfp
from rrfp.report import RankReport, StepReport

PARTS = ("compute_s", "idle_warmup_s", "idle_input_s", "idle_transfer_s", "idle_limit_s",
         "idle_slack_s", "idle_agreement_s", "host_s")


def rank_report(transfer_from_s, wall_s=1.0):
    transfer_s = sum(transfer_from_s.values())
    return RankReport(
        rank=1, wall_s=wall_s, compute_s=wall_s - transfer_s, idle_warmup_s=0.0,
        idle_input_s=0.0, idle_transfer_s=transfer_s, idle_limit_s=0.0, idle_slack_s=0.0,
        idle_agreement_s=0.0, host_s=0.0, peak_units=1, limit_units=2, records=(),
        transfer_from_s=transfer_from_s)


def test_every_second_is_in_one_part():
    fields = {f.name for f in dataclasses.fields(RankReport) if f.name.endswith("_s")}
    assert fields == {*PARTS, "wall_s", "transfer_from_s"}
    stages = [nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3)]
    data = list(torch.randn(5, 2, 4))
    for _ in range(3):
        result = rrfp.run_pipeline(stages, data, data, nn.functional.mse_loss)
    for rank in result.report.ranks:
        assert sum(getattr(rank, part) for part in PARTS) == pytest.approx(rank.wall_s)
        assert rank.idle_s == pytest.approx(rank.wall_s - rank.compute_s - rank.host_s)
        assert sum(rank.transfer_from_s.values()) == pytest.approx(rank.idle_transfer_s)
        assert rank.rank not in rank.transfer_from_s


def test_a_transfer_that_costs_is_named():
    text = str(StepReport((rank_report({0: 0.02, 2: 0.13}),)))
    assert text.splitlines()[-1] == (
        "rank 1 was idle for 150.00 ms (15.0 % of its wall time) while its next input was computed "
        "and in transfer: 130.00 ms from rank 2, 20.00 ms from rank 0")
    head, row = (line.split("  ") for line in text.splitlines()[:2])
    at = [cell.strip() for cell in head if cell].index("transfer")
    assert [cell.strip() for cell in row if cell][at] == "15.0 %"


def test_a_transfer_that_costs_little_is_not():
    assert "in transfer" not in str(StepReport((rank_report({0: 0.02, 2: 0.02}),)))
    assert "in transfer" not in str(StepReport((rank_report({}, wall_s=0.0),)))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "auto"),
        ({"hint": "1f1b", "slack": 0}, "1f1b, slack 0"),
        ({"hint": "bf"}, "bf"),
        ({"hint": "fb", "slack": None}, "fb, slack unlimited"),
        ({"hint": lambda task, state: task.microbatch}, "a callable"),
        ({"hint": ["0F0", "0B0", "1F0", "1B0"], "slack": 3}, "an order of 4 tasks, slack 3"),
        ({"forward_only": True}, "auto"),
    ],
)
def test_the_hint_is_named_as_it_was_given(options, said):
    data = [torch.randn(2, 4)]
    report = rrfp.run_pipeline(
        [nn.Linear(4, 4) for _ in range(2)], data, data, nn.functional.mse_loss, **options).report
    assert report.hint == said and f"\nhint {said}" in str(report)
