"""Tensor-parallel ranks that share a stage: gradients, one order, skew.

Four processes are two pipelines of two stages; the ranks of a stage meet in gloo collectives
inside every task, so any disagreement is a hang, which the watchdog turns into a failure.
"""

import importlib.util
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import rrfp

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests/python"))

from parity_group import worker_group  # noqa: E402

NUM_RANKS = 4
_mesh = None


def load_example():
    path = ROOT / "examples/02_tensor_parallel.py"
    spec = importlib.util.spec_from_file_location("tensor_parallel", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def mesh_of():
    global _mesh
    if _mesh is None:
        _mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    return _mesh


def run_mode(rank, num_ranks, mode, options):
    """(largest error, order, gradients as bytes) of one step."""
    example, mesh = load_example(), mesh_of()
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


@pytest.mark.time_limit(120)
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
@pytest.mark.time_limit(180)
@pytest.mark.parametrize("flag", [None, "--sequence-parallel", "--dtensor"])
def test_the_example_as_a_job(flag):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "4",
               str(ROOT / "examples/02_tensor_parallel.py"), *([flag] if flag else [])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150,
                          env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("gradients match") == 4


@pytest.mark.time_limit(120)
def test_deterministic_steps_have_the_same_bits_however_messages_come():
    options = {"deterministic": True}
    free = worker_group(NUM_RANKS).values(run_mode, "", options)
    fixed = worker_group(NUM_RANKS).values(run_mode, "", {**options, "hint": "1f1b", "slack": 0})
    assert [bits for _, _, bits in free] == [bits for _, _, bits in fixed]


class Skewed(torch.nn.Module):
    """A stage with an all-reduce inside F and B, and seeded delays of this member's own."""

    def __init__(self, group, seed, late_s):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(()))
        self.group, self.random, self.late_s = group, random.Random(seed), late_s

    def forward(self, value):
        time.sleep(self.random.random() * self.late_s)
        return Meet.apply(value * self.weight, self)


class Meet(torch.autograd.Function):
    """Sums over the group both ways; the members must be in the same task."""

    @staticmethod
    def forward(context, value, stage):
        context.stage = stage
        total = value.clone()
        dist.all_reduce(total, group=stage.group)
        return total / 2

    @staticmethod
    def backward(context, gradient):
        stage = context.stage
        time.sleep(stage.random.random() * stage.late_s)
        total = gradient.clone()
        dist.all_reduce(total, group=stage.group)
        return total / 2, None


def run_skewed(rank, num_ranks, seed, num_steps, late_s):
    """The order of each step, with member 1 late always; microbatches have values of their own."""
    mesh = mesh_of()
    stage, member = mesh["pp"].get_local_rank(), mesh["tp"].get_local_rank()
    module = Skewed(mesh["tp"].get_group(), seed * 10 + rank, late_s * (1 + 2 * member))
    draws = random.Random(seed)
    orders = []
    pipeline = rrfp.Pipeline({stage: module}, group=mesh, agreement_group="auto")
    with pipeline:
        for _ in range(num_steps):
            num_microbatches = draws.randint(1, 6)
            hint = draws.choice(["auto", "bf", "1f1b", "fb", "b-priority", "f-priority", "bfw"])
            limit = draws.choice([None, 2, 3, "1f1b+2"])
            values = [torch.tensor([float(m + 1)]) for m in range(num_microbatches)]
            module.weight.grad = None
            result = pipeline.step(
                values if stage == 0 else None,
                [None] * num_microbatches if stage == 1 else None,
                (lambda out, _: out.sum()) if stage == 1 else None,
                hint=hint, max_in_flight=limit,
            )
            # Every all-reduce mixed values of one microbatch, or the mean is off.
            want = sum(range(1, num_microbatches + 1)) / num_microbatches
            assert abs(module.weight.grad.item() - want) < 1e-5, (module.weight.grad, want)
            orders.append(result.report.ranks[0].order)
    return orders


def check_skewed(seed, num_steps, late_s, timeout_s=60.0):
    print(f"RRFP_SEED {seed}")
    answers = worker_group(NUM_RANKS).values(
        run_skewed, seed, num_steps, late_s, timeout_s=timeout_s
    )
    assert answers[0] == answers[1] and answers[2] == answers[3]
    return answers


def seed_of_run():
    return int(os.environ.get("RRFP_SEED", time.time_ns() % 100000))


@pytest.mark.time_limit(120)
def test_skewed_members_run_one_order():
    answers = check_skewed(seed_of_run(), 40, 0.001)
    # The net would be blind if the orders never left the hint's own.
    assert any(order != sorted(order) for order in answers[0])


@pytest.mark.slow
@pytest.mark.time_limit(900)
def test_a_thousand_skewed_steps():
    for part in range(10):
        check_skewed(seed_of_run() + part, 100, 0.002, timeout_s=300.0)


def run_stopped(rank, num_ranks, stopped):
    """As run_skewed; one rank is stopped for a second in the midst of it."""
    if rank == stopped:
        waker = (
            "import os, signal, sys, time; pid = int(sys.argv[1]); time.sleep(0.2); "
            "os.kill(pid, signal.SIGSTOP); time.sleep(1.0); os.kill(pid, signal.SIGCONT)"
        )
        child = subprocess.Popen([sys.executable, "-S", "-c", waker, str(os.getpid())])
    orders = run_skewed(rank, num_ranks, 7, 60, 0.002)
    if rank == stopped:
        assert child.wait(30) == 0
    return orders


@pytest.mark.time_limit(120)
def test_a_member_that_is_stopped_for_a_second_is_waited_for():
    answers = worker_group(NUM_RANKS).values(run_stopped, 1)
    assert answers[0] == answers[1] and answers[2] == answers[3]
