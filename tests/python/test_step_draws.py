"""The committed draws of steps replay: same makespans from the engine, none below its bound."""

import json
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
LINES = (BENCHMARKS / "results/step_draws.jsonl").read_text().splitlines()


@pytest.fixture(scope="module")
def step_draws():
    sys.path.insert(0, str(BENCHMARKS))
    try:
        import step_draws
    finally:
        sys.path.remove(str(BENCHMARKS))
    return step_draws


def longest_path_us(draw, split):
    """The time of a step in which every rank could run everything at once."""
    size, last = draw["microbatches"], draw["stages"] - 1
    longest = 0
    for m in range(size):
        end = 0
        for stage in range(last + 1):
            end += draw["F"][stage * size + m]
            end += draw["latency_F"][stage * size + m] if stage < last else 0
        for stage in range(last, -1, -1):
            end += draw["I" if split else "B"][stage * size + m]
            ends = end + draw["W"][stage * size + m] if split else end
            longest = max(longest, ends)
            end += draw["latency_B"][stage * size + m] if stage > 0 else 0
    return longest


@pytest.mark.parametrize("line", LINES, ids=range(len(LINES)))
def test_a_step_replays(step_draws, line):
    draw = json.loads(line)
    again = step_draws.evaluated(json.loads(line))
    assert again["makespan_us"] == draw["makespan_us"], (draw["model"], draw["seed"])
    assert again["lower_bound_us"] == draw["lower_bound_us"]
    for name, (split, _) in step_draws.POLICIES.items():
        bound = draw["lower_bound_us"]["split" if split else "unsplit"]
        kinds = "FIW" if split else "FB"
        busiest = max(
            sum(sum(draw[kind][stage * draw["microbatches"]:(stage + 1) * draw["microbatches"]])
                for kind in kinds) for stage in range(draw["stages"]))
        for limit in step_draws.LIMITS:
            makespan = draw["makespan_us"][f"{name}, limit {limit}"]
            assert makespan >= bound >= busiest, (name, limit)
            assert makespan >= longest_path_us(draw, split), (name, limit)


def test_every_model_is_there():
    models = [json.loads(line)["model"] for line in LINES]
    assert len(set(models)) == 12 and all(models.count(model) == 3 for model in models)
