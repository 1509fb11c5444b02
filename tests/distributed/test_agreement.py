"""Tensor-parallel ranks that share a stage: gradients, one order, skew.

Four processes are two pipelines of two stages; the ranks of a stage meet in gloo collectives
inside every task, so any disagreement is a hang, which the watchdog turns into a failure.
"""

import importlib.util
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests/python"))

from parity_group import worker_group  # noqa: E402
from skewed_members import mesh_of, run_skewed, run_stopped  # noqa: E402

NUM_RANKS = 4


def load_example():
    path = ROOT / "examples/02_tensor_parallel.py"
    spec = importlib.util.spec_from_file_location("tensor_parallel", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_mode(rank, num_ranks, mode, options):
    """(largest error, order, gradients as bytes) of one step."""
    example, mesh = load_example(), mesh_of(num_ranks)
    result, module = example.run_step(mesh, mode, **options)
    own = example.own_share(
        example.reference_gradients(2)[mesh["pp"].get_local_rank()],
        mesh["tp"].get_local_rank(), 2,
    )
    gradients = example.gradients_of(module, mode)
    error = max((g - w).abs().max().item() for g, w in zip(gradients, own))
    bits = b"".join(g.contiguous().numpy().tobytes() for g in gradients)
    return error, result.report.ranks[0].order, bits


MODES = {
    "linears": ("", {}),
    "sequence parallel": ("sequence", {}),
    "dtensor": ("dtensor", {}),
    "fixed order": ("", {"hint": "1f1b", "slack": 0}),
    "slack 2": ("", {"hint": "1f1b", "slack": 2}),
    "bf": ("", {"hint": "bf", "max_in_flight": "1f1b+2"}),
    "split": ("", {"hint": "bfw"}),
    "zb-h1": ("", {"hint": "zb-h1", "slack": None}),
    "deterministic": ("", {"deterministic": True}),
    "bytes": ("", {"max_in_flight": "100B", "activation_bytes": 30}),
    "mid": ("", {"microbatch_order": "mid", "costs": [3, 1, 2, 5, 4, 6]}),
}


@pytest.mark.parametrize("name", MODES)
def test_gradients_equal_the_reference_and_orders_agree(name):
    answers = worker_group(NUM_RANKS).values(run_mode, *MODES[name])
    for error, _, _ in answers:
        assert error < 1e-4
    assert answers[0][1] == answers[1][1]  # the members of stage 0
    assert answers[2][1] == answers[3][1]
    assert len(answers[0][1]) == len(set(answers[0][1])) >= 12


def run_refused(rank, num_ranks, options):
    try:
        run_mode(rank, num_ranks, "", options)
    except ValueError as error:
        return str(error)


def test_members_cannot_measure_bytes_alike():
    """Sizes that every member has seen for itself may differ, and with them their decisions."""
    answers = worker_group(NUM_RANKS).values(run_refused, {"max_in_flight": "100B"})
    assert all("activation_bytes for every stage" in answer for answer in answers)


@pytest.mark.slow
@pytest.mark.parametrize("flag", [None, "--sequence-parallel", "--dtensor"])
def test_the_example_as_a_job(flag):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "4",
               str(ROOT / "examples/02_tensor_parallel.py"), *([flag] if flag else [])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300,
                          env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("gradients match") == 4


def test_deterministic_steps_have_the_same_bits_however_messages_come():
    options = {"deterministic": True}
    free = worker_group(NUM_RANKS).values(run_mode, "", options)
    fixed = worker_group(NUM_RANKS).values(run_mode, "", {**options, "hint": "1f1b", "slack": 0})
    assert [bits for _, _, bits in free] == [bits for _, _, bits in fixed]


def check_skewed(num_ranks, seed, *arguments, timeout_s=180.0):
    print(f"RRFP_SEED {seed}")
    answers = worker_group(num_ranks).values(run_skewed, seed, *arguments, timeout_s=timeout_s)
    assert_one_order(answers)
    return answers


def assert_one_order(answers):
    for member in range(0, len(answers), 2):
        assert answers[member] == answers[member + 1]


def seed_of_run():
    return int(os.environ.get("RRFP_SEED", time.time_ns() % 100000))


SHAPES = {"TP2 x PP2": (4, 1), "TP2 x V2": (2, 2), "TP2 x PP2 x V2": (4, 2)}


@pytest.mark.parametrize("shape", SHAPES)
def test_skewed_members_run_one_order(shape):
    num_ranks, num_chunks = SHAPES[shape]
    answers = check_skewed(num_ranks, seed_of_run(), 25, 0.001, num_chunks)
    # The net would be blind if the orders never left the hint's own.
    assert any(order != sorted(order) for order in answers[0])


@pytest.mark.slow
@pytest.mark.time_limit(1800)
@pytest.mark.parametrize("shape", ["TP2 x PP2", "TP2 x V2"])
def test_a_thousand_skewed_steps(shape):
    num_ranks, num_chunks = SHAPES[shape]
    for part in range(10):
        check_skewed(num_ranks, seed_of_run() + part, 100, 0.002, num_chunks, timeout_s=300.0)


@pytest.mark.parametrize("shape", ["TP2 x PP2", "TP2 x V2"])
def test_a_member_that_is_stopped_for_a_second_is_waited_for(shape):
    num_ranks, num_chunks = SHAPES[shape]
    assert_one_order(worker_group(num_ranks).values(run_stopped, 1, 40, num_chunks))
