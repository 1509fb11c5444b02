"""torch's schedule files as hints: what torch wrote is the oracle.

Would catch: rows taken for columns, a cell lost or read twice, communication taken for tasks, a
full backward among split ones that keeps only one half, a file for other ranks that is accepted.
"""

import os
import re
import types

import parity_model as model
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from parity_group import worker_group
from torch.distributed.pipelining import schedules

import rrfp
from rrfp import _C
from rrfp.hints import normalise_hint
from rrfp.schedule_csv import read_schedule

LOOP, V = (0, 1, 0, 1), (0, 1, 1, 0)
SCHEDULES = {
    "ScheduleInterleaved1F1B": LOOP,
    "ScheduleLoopedBFS": LOOP,
    "ScheduleInterleavedZeroBubble": LOOP,
    "ScheduleZBVZeroBubble": V,
    "ScheduleDualPipeV": V,
}


def torch_schedule(name, rank_of_stage, num_microbatches):
    """torch's schedule for rank 0, without the stages it would run."""
    num_stages = len(rank_of_stage)
    own = [
        types.SimpleNamespace(
            stage_index=stage, num_stages=num_stages, group_size=max(rank_of_stage) + 1,
            group_rank=0, group=None, submod=None, has_backward=True, is_first=stage == 0,
            is_last=stage == num_stages - 1,
        )
        for stage in range(num_stages)
        if rank_of_stage[stage] == 0
    ]
    return getattr(schedules, name)(own, num_microbatches, loss_fn=lambda output, target: output)


def dumped(path, schedule, form):
    try:
        schedule._dump_csv(path, format=form)
    except TypeError:  # a torch whose schedules have one form only
        schedule._dump_csv(path)
    return path


def tasks_by_rank(schedule):
    return {
        rank: [str(action) for action in actions if action is not None]
        for rank, actions in schedule.pipeline_order.items()
    }


@pytest.mark.parametrize("form", ["compute_only", "compute_comms"])
@pytest.mark.parametrize("name", [n for n in SCHEDULES if n != "ScheduleDualPipeV"])
def test_what_torch_wrote(tmp_path, name, form):
    rank_of_stage = SCHEDULES[name]
    schedule = torch_schedule(name, rank_of_stage, 6)
    path = dumped(tmp_path / "schedule.csv", schedule, form)
    expected = tasks_by_rank(schedule)
    text = path.read_text()
    for hint in (path, str(path), text, text + "\n\n", text.replace(",", " , ")):
        kind, order = normalise_hint(hint, rank_of_stage)
        assert kind == "order"
        rank_order = {r: [t for t in order if rank_of_stage[int(t[0])] == r] for r in (0, 1)}
        if form == "compute_only":
            assert order == expected[0] + expected[1]
        else:  # torch moves tasks of different stages when it adds communication
            assert {r: sorted(t) for r, t in rank_order.items()} == {
                r: sorted(t) for r, t in expected.items()
            }
    edges = [(s, s + 1) for s in range(3)]
    graph = _C.StageGraph(2, list(rank_of_stage), edges, [3])
    is_split = any("W" in text for text in order)
    plan = _C.StepPlan(graph, 6, [], "order", order, 0, [], False, is_split)
    for rank in (0, 1):
        assert plan.order(rank) == rank_order[rank]


def test_overlapped_actions_are_refused(tmp_path):
    schedule = torch_schedule("ScheduleDualPipeV", V, 4)
    path = dumped(tmp_path / "schedule.csv", schedule, "compute_only")
    with pytest.raises(ValueError, match=r"\(0F3;3B1\)OVERLAP_F_B.*row 0"):
        normalise_hint(path)


def test_full_backwards_among_split_ones_become_both_halves():
    _, order = normalise_hint("0F0,0F1,0B0,0I1,0W1\n1F0,1B0,1F1,1I1,,1W1\n")
    assert order == ["0F0", "0F1", "0I0", "0W0", "0I1", "0W1",
                     "1F0", "1I0", "1W0", "1F1", "1I1", "1W1"]
    assert normalise_hint("0F0,0B0")[1] == ["0F0", "0B0"]


@pytest.mark.parametrize(
    ("hint", "words"),
    [
        ("nowhere.csv", ["nowhere.csv", "No such file"]),
        ("0F0,0X0", ["'0X0'", "row 0, cell 1"]),
        ("0F0\n1F0,1F", ["'1F'", "row 1, cell 1"]),
        ("0F0,-1F0", ["'-1F0'"]),
        ("0F0,0F99999999999999", ["0F99999999999999"]),
        ("0F0,0OVERLAP_F_B", ["OVERLAP_F_B", "fused"]),
        ("0F0,\x000B0", ["0B0"]),
        ("\n", ["empty"]),
        (",,,", ["empty"]),
        ('0F0,"0B0', ["0B0"]),
    ],
)
def test_what_is_no_schedule_is_refused(hint, words):
    with pytest.raises(ValueError) as caught:
        normalise_hint(hint, (0,))
    for word in words:
        assert word in str(caught.value)


def test_rows_for_other_ranks_are_refused():
    text = "1F0,1B0\n0F0,0B0\n"
    with pytest.raises(ValueError, match="1F0 for rank 0, but stage 1 is on rank 1"):
        normalise_hint(text, (0, 1))
    with pytest.raises(ValueError, match="0F0 for rank 1, but stage 0 is on rank 0"):
        normalise_hint({1: ["0F0", "0B0"]}, (0, 1))


def test_a_binary_file_is_refused(tmp_path):
    path = tmp_path / "schedule.csv"
    path.write_bytes(os.urandom(8) + b"\xff\xfe")
    with pytest.raises(ValueError, match="schedule.csv"):
        normalise_hint(path)


def run_rank(rank, num_ranks, mode, text):
    stages = [model.RecordingStage(7, s, torch.float64) for s in range(2)]
    owned = range(2) if mode == "threads" else [rank]
    inputs, targets, _ = model.make_batch(3, 0, 4, torch.float64)
    rrfp.run_pipeline(
        stages if mode == "threads" else {rank: stages[rank]},
        inputs if 0 in owned else None,
        targets if 1 in owned else None,
        model.squared_error,
        hint=text,
        slack=0,
    )
    return {s: stages[s].log for s in owned}


@pytest.mark.parametrize("mode", ["threads", "processes"])
def test_the_schedule_is_what_runs(tmp_path, mode):
    schedule = torch_schedule("ScheduleInterleaved1F1B", (0, 1), 4)
    path = dumped(tmp_path / "schedule.csv", schedule, "compute_only")
    group = worker_group(1, False) if mode == "threads" else worker_group(2)
    logs = {s: log for part in group.values(run_rank, mode, path) for s, log in part.items()}
    assert logs == tasks_by_rank(schedule)


CELLS = st.one_of(
    st.sampled_from(["", " ", "0F0", "1B2", "2I1", "2W1", "0SEND_F0", "3RECV_B1", "1UNSHARD",
                     "(0F1;1B0)OVERLAP_F_B", "0f0", "F0", "99999999999999999999F0", "0F0 0F1",
                     "-1F0", "0F0.csv", "\x00", "\u0661F0", "\ufeff0F0", '"0F0"']),
    st.text(max_size=6),
)


@given(st.lists(st.lists(CELLS, max_size=5), max_size=5))
@settings(deadline=None, max_examples=200)
def test_any_text_is_a_schedule_or_refused_by_name(rows):
    """Whatever stands in a file: task texts of its rows, or a ValueError that names the cell."""
    text = "\n".join(",".join(row) for row in rows) + ",\n"
    try:
        order = read_schedule(text)
    except ValueError as error:
        assert "row" in str(error) and "cell" in str(error)
        return
    for texts in order.values():
        for task in texts:
            assert re.fullmatch(r"\d+[FBIW]\d+", task, re.ASCII), task


@given(st.binary(max_size=60))
@settings(deadline=None, max_examples=60)
def test_any_file_is_a_schedule_or_refused(tmp_path_factory, content):
    path = tmp_path_factory.mktemp("schedules") / "schedule.csv"
    path.write_bytes(content)
    try:
        read_schedule(path)
    except ValueError as error:
        assert "schedule" in str(error)
