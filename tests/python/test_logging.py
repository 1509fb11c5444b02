"""What rrfp says in its log: one line at set-up, and few warnings, each true.

Would catch: a warning at every step, one for a pipeline that only fills and drains, none where a
limit or the host costs a large share of the time.
"""

import logging
import time
from types import SimpleNamespace

import parity_model as model
import pytest
import torch
from parity_group import worker_group
from torch import nn

import rrfp
from rrfp import cost_watch
from rrfp.cost_watch import CostWatch


def rank_of(step_s=1.0, compute=0.8, limit=0.0, host=0.0, num_microbatches=16, limit_units=4,
            **more):
    records = tuple(SimpleNamespace(task=f"0{kind}{m}") for kind in "FB"
                    for m in range(num_microbatches))
    values = {"rank": 0, "wall_s": step_s, "compute_s": compute * step_s,
              "idle_limit_s": limit * step_s, "host_s": host * step_s, "records": records,
              "num_tasks": len(records), "limit_units": limit_units, "peak_units": limit_units,
              "limit_bytes": None, "peak_bytes": None, "overshoot_bytes": 0}
    return SimpleNamespace(**{**values, **more})


def warnings_of(caplog, ranks, on_gpus=False, forward_only=False):
    caplog.clear()
    watch = CostWatch(on_gpus)
    with caplog.at_level("WARNING", logger="rrfp"):
        for rank in ranks:
            watch.look(SimpleNamespace(ranks=(rank,)), forward_only)
    return [record.getMessage() for record in caplog.records]


def test_what_persists_is_said_once(caplog):
    for cause, words in (({"limit": 0.4}, "held ready forwards of rank 0 back for 24 %"),
                         ({"host": 0.2, "compute": 0.64},
                          "bound by the host: its tasks take 20000 us"),
                         ({"step_s": 1e-3}, "bound by the host: its tasks take 25 us")):
        said = warnings_of(caplog, [rank_of(**cause)] * 900)
        assert len(said) == 1 and words in said[0], said
        assert len(warnings_of(caplog, [rank_of(**cause)] * 2500)) == 3
        assert not warnings_of(caplog, [rank_of(**cause)] * 39)
        assert not warnings_of(caplog, ([rank_of(**cause)] * 39 + [rank_of()]) * 20)
        assert not warnings_of(caplog, [rank_of(**cause)] * 50, on_gpus=True)
        assert not warnings_of(caplog, [rank_of(**cause)] * 50, forward_only=True)


def test_a_host_that_only_launches_is_told(caplog):
    """On GPUs, where the report cannot tell what the device waits for."""
    launching = rank_of(compute=0.88, host=0.02)
    said = warnings_of(caplog, [launching] * 900, on_gpus=True)
    assert len(said) == 1 and "inside its stage functions for 90 % of a step" in said[0], said
    assert not warnings_of(caplog, [launching] * 39, on_gpus=True)
    assert not warnings_of(caplog, [rank_of(compute=0.5, host=0.02)] * 50, on_gpus=True)
    assert not warnings_of(caplog, [launching] * 50, on_gpus=True, forward_only=True)


def test_filling_and_draining_is_no_news(caplog):
    assert not warnings_of(caplog, [rank_of(limit=0.15)] * 50)
    assert not warnings_of(caplog, [rank_of(limit=0.4, num_microbatches=4)] * 50)


def test_an_overshoot_is_said_at_once(caplog):
    over = rank_of(limit_bytes=1 << 20, peak_bytes=3 << 19, overshoot_bytes=1 << 19,
                   limit_units=-1)
    for on_gpus in (False, True):
        said = warnings_of(caplog, [over] * 30, on_gpus)
        assert len(said) == 1
        assert "held 1.50 MiB of activations, above its limit of 1.00 MiB" in said[0]
    over.limit_units = 4  # a first step, which counted microbatches
    assert not warnings_of(caplog, [over] * 30)


class Sleeper(nn.Module):
    def __init__(self, seconds):
        super().__init__()
        self.linear, self.seconds = nn.Linear(4, 4), seconds

    def forward(self, x):
        time.sleep(self.seconds)
        return self.linear(x)


@pytest.mark.parametrize(("max_in_flight", "expected"), [(1, True), (8, False)])
def test_a_real_step_that_the_limit_binds(caplog, max_in_flight, expected):
    """With one microbatch in flight the ranks take turns."""
    stages = [Sleeper(0.002), Sleeper(0.002), Sleeper(0.002)]
    batch = torch.randn(8, 4).chunk(4)
    with caplog.at_level("WARNING", logger="rrfp"), rrfp.Pipeline(stages) as pipeline:
        for _ in range(41):
            pipeline.step(batch, batch, nn.functional.mse_loss, max_in_flight=max_in_flight)
    said = [r.getMessage() for r in caplog.records if "max_in_flight may help" in r.getMessage()]
    assert bool(said) == expected, caplog.text
    assert "bound by the host" not in caplog.text
    assert len(said) <= 1


def test_real_steps_that_the_host_binds(caplog, monkeypatch):
    """Short tasks, whatever this machine takes for one; said once, however long it goes on."""
    monkeypatch.setattr(cost_watch, "_SHORT_TASK_S", 1.0)
    monkeypatch.setattr(cost_watch, "_NUM_STEPS", 3)  # on end, which a busy machine interrupts
    batch = torch.randn(8, 4).chunk(4)
    with caplog.at_level("WARNING", logger="rrfp"), rrfp.Pipeline([nn.Linear(4, 4)]) as pipeline:
        for _ in range(500):
            pipeline.step(batch, batch, nn.functional.mse_loss)
            if caplog.records:
                break
        for _ in range(20):
            pipeline.step(batch, batch, nn.functional.mse_loss)
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 1 and "rank 0 is bound by the host" in said[0], said


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_step_that_only_launches(caplog):
    stage = nn.Sequential(*[nn.Linear(8, 8) for _ in range(100)]).cuda()
    batch = torch.randn(8, 8, device="cuda").chunk(4)
    with caplog.at_level("WARNING", logger="rrfp"), rrfp.Pipeline([stage]) as pipeline:
        for _ in range(cost_watch._NUM_STEPS + 5):
            pipeline.step(batch, batch, nn.functional.mse_loss)
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 1 and "launching takes longer than computing" in said[0], said


def run_set_up(rank, num_ranks, mode):
    """The lines of a pipeline's set-up and of two steps."""
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger = logging.getLogger("rrfp")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        stages = [model.RecordingStage(5, s, torch.float64) for s in range(2)]
        inputs, targets, _ = model.make_batch(5, 0, 4, torch.float64)
        with rrfp.Pipeline(stages if mode == "threads" else {rank: stages[rank]}) as pipeline:
            for _ in range(2):
                pipeline.step(inputs if rank == 0 else None,
                              targets if rank == num_ranks - 1 else None, model.squared_error)
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    return lines


@pytest.mark.parametrize(("mode", "words"), [("threads", ["2 ranks in one process", "local"]),
                                             ("processes", ["rank {rank} of 2", "socket"])])
def test_one_line_at_set_up(mode, words):
    group = worker_group(1, False) if mode == "threads" else worker_group(2)
    for rank, lines in enumerate(group.values(run_set_up, mode)):
        assert len(lines) == 1, lines
        for word in [*words, f"version {rrfp.__version__}", f"torch {torch.__version__}"]:
            assert word.format(rank=rank) in lines[0]
