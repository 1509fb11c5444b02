"""Ranks that are threads of one process and take turns: the trial, and what stays as it is."""

import threading

import pytest
import torch
from torch import nn

import rrfp
from rrfp import turn_trial
from rrfp.settings import read_settings
from rrfp.turn_trial import TurnTrial

SHORT_S, LONG_S = 20e-6, 2e-3


@pytest.fixture
def in_turn(monkeypatch):
    """Every step is in turn; the list of what the trial was told."""
    told = []
    monkeypatch.setattr(TurnTrial, "choose", lambda self, kind: True)
    monkeypatch.setattr(TurnTrial, "learn", lambda self, *what: told.append(what))
    return told


@pytest.fixture
def two_cores(monkeypatch):
    monkeypatch.setattr(turn_trial.os, "sched_getaffinity", lambda process: {0, 1})


def run_trial(trial, num_steps, side_by_side_s, in_turn_s):
    """The ways of so many steps, which take what is given per task."""
    ways = []
    for _ in range(num_steps):
        way = trial.choose("step")
        ways.append(way)
        trial.learn("step", way, 100 * (in_turn_s if way else side_by_side_s), 100)
    return ways


def chain(num_stages):
    torch.manual_seed(3)
    return [nn.Sequential(nn.Linear(8, 8), nn.Tanh()).double() for _ in range(num_stages)]


def test_both_ways_are_tried_and_the_quicker_is_kept(two_cores):
    ways = run_trial(TurnTrial(2), 300, SHORT_S, 0.5 * SHORT_S)
    assert ways[:3] == [False] * 3
    assert ways[3:9] == [False, True] * 3
    assert ways[9:259] == [True] * 250
    assert ways[259:265] == [False, True] * 3  # again


@pytest.mark.parametrize("in_turn_s", [SHORT_S, 3 * SHORT_S, 0.97 * SHORT_S])
def test_turns_that_gain_nothing_are_not_taken_for_long(two_cores, in_turn_s):
    ways = run_trial(TurnTrial(2), 2600, SHORT_S, in_turn_s)
    assert sum(ways) == 6  # 3 of each trial


def test_long_tasks_are_not_tried(two_cores):
    assert not any(run_trial(TurnTrial(4), 100, LONG_S, LONG_S / 4))


def test_tasks_that_become_long_end_turns(two_cores):
    trial = TurnTrial(2)
    assert run_trial(trial, 20, SHORT_S, 0.5 * SHORT_S)[-1]
    trial.learn("step", True, 100 * LONG_S, 100)
    assert not any(run_trial(trial, 3, SHORT_S, SHORT_S))


def test_steps_of_another_kind_are_not_compared(two_cores):
    """Every second step is an evaluation, whose tasks take half as long."""
    trial, ways = TurnTrial(2), []
    for step in range(100):
        kind = ("train", "evaluate")[step % 2]
        ways.append(trial.choose(kind))
        trial.learn(kind, ways[-1], 100 * SHORT_S / (1 + step % 2), 100)
    assert sum(ways) == 3  # of the trial, which found no difference


def test_a_trial_whose_kind_does_not_come_back_begins_anew(two_cores):
    trial = TurnTrial(2)
    run_trial(trial, 4, SHORT_S, 0.5 * SHORT_S)
    ways = []
    for _ in range(70):
        ways.append(trial.choose("other"))
        trial.learn("other", ways[-1], 50 * SHORT_S if ways[-1] else 100 * SHORT_S, 100)
    assert not any(ways[:50]) and all(ways[-5:])


def test_one_rank_or_one_core_has_nobody_to_take_turns_with(monkeypatch, two_cores):
    assert not any(run_trial(TurnTrial(1), 50, SHORT_S, SHORT_S / 2))
    monkeypatch.setattr(turn_trial.os, "sched_getaffinity", lambda process: {0})
    assert not any(run_trial(TurnTrial(2), 50, SHORT_S, SHORT_S / 2))


def test_the_setting():
    assert read_settings({}).turns
    assert not read_settings({"RRFP_TURNS": "off"}).turns
    with pytest.raises(ValueError, match="RRFP_TURNS is '1'; it must be on or off"):
        read_settings({"RRFP_TURNS": "1"})


@pytest.mark.parametrize("num_stages", [2, 3, 4])
@pytest.mark.parametrize("options", [
    {}, {"hint": "1f1b", "slack": 0}, {"hint": "gpipe", "max_in_flight": 16},
    {"split_backward": True}, {"hint": "bf", "microbatch_order": "mid", "costs": range(1, 13)},
], ids=str)
def test_gradients_are_those_of_a_plain_loop(in_turn, num_stages, options):
    stages, inputs = chain(num_stages), list(torch.randn(12, 4, 8, dtype=torch.float64))
    targets = list(torch.randn(12, 4, 8, dtype=torch.float64))
    pipeline = rrfp.Pipeline(stages)
    for _ in range(3):
        for stage in stages:
            stage.zero_grad()
        result = pipeline.step(inputs, targets, nn.functional.mse_loss, **options)
    pipeline.close()
    got = [p.grad.clone() for stage in stages for p in stage.parameters()]
    whole = nn.Sequential(*stages)
    whole.zero_grad()
    losses = [nn.functional.mse_loss(whole(x), y) for x, y in zip(inputs, targets, strict=True)]
    (sum(losses) / 12).backward()
    for mine, parameter in zip(got, whole.parameters(), strict=True):
        torch.testing.assert_close(mine, parameter.grad, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(torch.stack(list(result.losses)), torch.stack(losses).detach())
    num_tasks = sum(len(rank.records) for rank in result.report.ranks)
    assert len(in_turn) == 3 and all(told[3] == num_tasks for told in in_turn)


def test_training_and_evaluation_are_two_kinds_of_step(in_turn):
    inputs = list(torch.ones(4, 2, 4))
    with rrfp.Pipeline([nn.Linear(4, 4), nn.Linear(4, 4)]) as pipeline:
        for forward_only in (False, True, False):
            pipeline.step(inputs, inputs, nn.functional.mse_loss, forward_only=forward_only)
    train, evaluate, again = (told[0] for told in in_turn)
    assert train == again != evaluate


class Meeting(nn.Module):
    """Ends its first forward once the other stage's has begun, or says that it never did."""

    def __init__(self, event, waits):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.event, self.waits, self.met = event, waits, None

    def forward(self, x):
        if self.waits and self.met is None and x.sum() > 0:
            self.met = self.event.wait(60)
        elif not self.waits:
            self.event.set()
        return self.linear(x)


def test_stages_that_wait_for_one_another_still_run_side_by_side(in_turn):
    """The first stage's second forward waits for the second stage's first."""
    event = threading.Event()
    stages = [Meeting(event, waits=True), Meeting(event, waits=False)]
    inputs = [-torch.ones(2, 4), *torch.ones(5, 2, 4)]
    rrfp.run_pipeline(stages, inputs, inputs, nn.functional.mse_loss)
    assert stages[0].met


class Failing(nn.Module):
    def forward(self, x):
        raise ValueError("a stage fails in its turn")


def test_a_failing_stage_is_told_and_the_next_pipeline_runs(in_turn):
    inputs = list(torch.ones(6, 2, 4))
    with pytest.raises(rrfp.StageError, match="a stage fails in its turn"):
        rrfp.run_pipeline([nn.Linear(4, 4), Failing()], inputs, inputs, nn.functional.mse_loss)
    stages = [nn.Linear(4, 4), nn.Linear(4, 4)]
    rrfp.run_pipeline(stages, inputs, inputs, nn.functional.mse_loss)
    assert stages[0].weight.grad is not None
