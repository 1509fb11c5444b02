"""A callable hint ranks the tasks of every step, in every process mode.

Would catch: a number read upside down, a hint asked once and never again, ranks that rank by
functions of their own, tasks of another kind than the step has, a state that is not the step's.
"""

import re
from pathlib import Path

import numpy as np
import parity_model as model
import pytest
import torch
from parity_group import worker_group

import rrfp

P, M = 3, 5
MODES = pytest.mark.parametrize("mode", ["threads", "processes"])


def last_first(task, state):
    """Backwards first; of one kind the last microbatch first."""
    return (task.kind == "F") * state.num_microbatches - task.microbatch


def gpipe_upside_down(task, state):
    """All forwards first, the last microbatch first; the backwards in the order given."""
    sign = -1 if task.kind == "F" else 1
    return (task.kind != "F") * 1000 + sign * task.microbatch


def cheapest_first_in_odd_steps(task, state):
    cost = state.costs[task.microbatch]
    place = sorted(state.costs).index(cost) if state.step % 2 else task.microbatch
    return (task.kind != "F") * state.num_microbatches + place


def run_rank(rank, num_ranks, mode, function, steps, options):
    """({stage: log of each step}, {stage: gradients})."""
    owned = range(P) if mode == "threads" else [rank]
    stages = [model.RecordingStage(7, s, torch.float64) for s in range(P)]
    logs = {s: [] for s in owned}
    for _ in range(steps):
        inputs, targets, costs = model.make_batch(3, 0, M, torch.float64)
        costs = [c + i / 10 for i, c in enumerate(costs)]
        rrfp.run_pipeline(
            stages if mode == "threads" else stages[rank], inputs if 0 in owned else None,
            targets if P - 1 in owned else None, model.squared_error, hint=function,
            costs=costs, stall_timeout_s=30.0, **options,
        )
        for s in owned:
            logs[s].append(stages[s].log[:])
            stages[s].log.clear()
    return logs, {s: {n: p.grad for n, p in stages[s].named_parameters()} for s in owned}


def run(mode, function, steps=1, **options):
    group = worker_group(1, False) if mode == "threads" else worker_group(P)
    answers = group.values(run_rank, mode, function, steps, options)
    logs = {s: log for part, _ in answers for s, log in part.items()}
    gradients = {s: g for _, part in answers for s, g in part.items()}
    return logs, gradients


def check_gradients(gradients, steps=1):
    stages = [model.RecordingStage(7, s, torch.float64) for s in range(P)]
    inputs, targets, _ = model.make_batch(3, 0, M, torch.float64)
    for _ in range(steps):
        model.plain_loop(stages, inputs, targets, model.squared_error, [1 / M] * M)
    for s, stage in enumerate(stages):
        for name, parameter in stage.named_parameters():
            assert model.gradient_error(gradients[s][name], parameter.grad) < 1e-10


@MODES
def test_the_lowest_number_goes_first(mode):
    logs, gradients = run(mode, gpipe_upside_down, slack=0)
    for stage in range(P):
        forwards = [f"{stage}F{m}" for m in reversed(range(M))]
        assert logs[stage] == [forwards + [f"{stage}B{m}" for m in range(M)]]
    check_gradients(gradients)


@MODES
def test_it_is_asked_in_every_step(mode):
    costs = [c + i / 10 for i, c in enumerate(model.make_batch(3, 0, M, torch.float64)[2])]
    logs, gradients = run(mode, cheapest_first_in_odd_steps, steps=4, slack=0)
    by_cost = sorted(range(M), key=costs.__getitem__)
    assert by_cost != list(range(M))
    orders = [[int(text[-1]) for text in log[:M]] for log in logs[1]]
    first = orders.index(list(range(M)))  # which steps are odd is the cached pipeline's business
    assert orders[first] == orders[(first + 2) % 4] == list(range(M))
    assert orders[(first + 1) % 4] == orders[(first + 3) % 4] == by_cost
    check_gradients(gradients, steps=4)


@MODES
@pytest.mark.parametrize("options", [
    {}, {"max_in_flight": 1}, {"split_backward": True}, {"deterministic": True},
    {"split_backward": True, "deterministic": True, "max_in_flight": 2}, {"slack": 0, "split": 0},
], ids=str)
def test_gradients_are_a_plain_loop_s(mode, options):
    options = dict(options)
    function = gpipe_upside_down if options.pop("split", None) is not None else last_first
    _, gradients = run(mode, function, **options)
    check_gradients(gradients)


def test_it_sees_the_step():
    seen = []

    def look(task, state):
        seen.append((task, state))
        return 0

    stages = [torch.nn.Linear(2, 2) for _ in range(4)]
    data = [torch.randn(1, 2) for _ in range(3)]
    with rrfp.Pipeline(stages, num_ranks=2) as pipeline:
        pipeline.step(data, data, torch.nn.functional.mse_loss, hint=look)
        pipeline.eval_step(data, data, torch.nn.functional.mse_loss, hint=look)
        pipeline.step(data, data, torch.nn.functional.mse_loss, hint=look, costs=[1, 2, 3],
                      split_backward=True)
    kinds = [[task.kind for task, state in seen if state.step == step] for step in range(3)]
    assert [sorted(set(of_step)) for of_step in kinds] == [["B", "F"], ["F"], ["F", "I", "W"]]
    assert [len(of_step) for of_step in kinds] == [24, 12, 36]
    state = seen[-1][1]
    assert (state.num_stages, state.num_ranks, state.num_microbatches) == (4, 2, 3)
    assert state.rank_of_stage == (0, 1, 0, 1) and state.edges == ((0, 1), (1, 2), (2, 3))
    assert state.loss_stages == (3,) and state.costs == (1.0, 2.0, 3.0)
    assert seen[0][1].costs is None and not seen[0][1].split_backward


def test_the_documented_one():
    page = (Path(__file__).parents[2] / "docs/concepts.md").read_text()
    (source,) = re.findall(r"^def longest_first.*?(?=^```$)", page, re.M | re.S)
    names = {}
    exec(source, names)
    step = rrfp.simulate(lambda kind, stage, m: 1.0, num_stages=1, num_microbatches=3,
                         hint=names["longest_first"], costs=[5, 9, 7], max_in_flight=3)
    assert [task.task for task in step.ranks[0]] == ["0F1", "0B1", "0F2", "0B2", "0F0", "0B0"]


def test_it_ranks_simulated_steps():
    step = rrfp.simulate(lambda kind, stage, m: 1.0, num_stages=2, num_microbatches=3, slack=0,
                         hint=lambda task, state: (task.kind != "F") * 9 + task.microbatch)
    assert [task.task for task in step.ranks[0]] == ["0F0", "0F1", "0F2", "0B0", "0B1", "0B2"]


def grouped_rank(rank, num_ranks, differ):
    """Two pipelines of two ranks in agreement; their functions are alike or not."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    sign = -1 if differ and rank % 2 else 1
    torch.manual_seed(rank // 2)
    stage = torch.nn.Linear(2, 2)
    data = [torch.ones(1, 2) for _ in range(4)]
    result = rrfp.run_pipeline(
        stage, data if rank < 2 else None, data if rank >= 2 else None,
        torch.nn.functional.mse_loss, group=mesh, agreement_group="auto",
        hint=lambda task, state: sign * task.microbatch, stall_timeout_s=20.0,
    )
    return result.report.ranks[0].order


def test_members_of_an_agreement_group_must_rank_alike():
    orders = worker_group(4).values(grouped_rank, False)
    assert orders[0] == orders[1] and orders[2] == orders[3]
    answers = worker_group(4).run(grouped_rank, True)
    for answer in answers:
        assert answer.error_type == "ValueError", answer
        assert "members of an agreement group disagree on order" in answer.error_text


@pytest.mark.parametrize("number", [np.float32, np.int64, torch.tensor, lambda x: 10**400 + x])
def test_numbers_of_other_kinds(number):
    """Those of NumPy and torch, and integers that no float can hold."""
    step = rrfp.simulate(lambda kind, stage, m: 1.0, num_stages=2, num_microbatches=3, slack=0,
                         hint=lambda task, state: number("FB".index(task.kind)))
    assert [task.task for task in step.ranks[0]] == ["0F0", "0F1", "0F2", "0B0", "0B1", "0B2"]
