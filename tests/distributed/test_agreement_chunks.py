"""Tensor-parallel ranks with two stages each: gradients, bits, one order."""

import sys
from pathlib import Path

import pytest

import rrfp

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests/python"))

from parity_group import worker_group  # noqa: E402
from skewed_members import mesh_of  # noqa: E402
from test_agreement import load_example  # noqa: E402

NUM_CHUNKS = 2


def own_stages(num_pipeline_ranks, rank, placement):
    num_stages = NUM_CHUNKS * num_pipeline_ranks
    return (rank, num_stages - 1 - rank if placement == "v" else num_pipeline_ranks + rank)


def run_chunks(rank, num_ranks, mode, placement, options):
    """(largest error, order, gradients as bytes) of one step."""
    example, mesh = load_example(), mesh_of(num_ranks)
    num_stages = NUM_CHUNKS * mesh["pp"].size()
    tp = mesh["tp"].get_group()
    whole = example.whole_blocks(num_stages)
    stages = {
        stage: example.dtensor_block(whole[stage], mesh["tp"]) if mode == "dtensor"
        else example.ParallelBlock(whole[stage], tp, sequence_parallel=mode == "sequence")
        for stage in own_stages(mesh["pp"].size(), mesh["pp"].get_local_rank(), placement)
    }
    inputs, targets = example.batch()
    if mode == "sequence":
        inputs, targets = ([example._own_rows(t, tp) for t in part] for part in (inputs, targets))
    has_last = num_stages - 1 in stages
    result = rrfp.run_pipeline(
        stages,
        inputs if 0 in stages else None,
        targets if has_last else None,
        example.loss_fn if has_last else None,
        group=mesh,
        agreement_group="auto",
        placement=placement,
        **options,
    )
    member = mesh["tp"].get_local_rank()
    error, bits = 0.0, b""
    for stage, module in stages.items():
        wanted = example.own_share(example.reference_gradients(num_stages)[stage], member, 2)
        for gradient, want in zip(example.gradients_of(module, mode), wanted):
            error = max(error, (gradient - want).abs().max().item())
            bits += gradient.contiguous().numpy().tobytes()
    return error, result.report.ranks[0].order, bits


CASES = {
    "interleaved": ("", "loop", {"hint": "interleaved"}),
    "auto": ("", "loop", {}),
    "split": ("", "loop", {"hint": "bfw"}),
    "split, v": ("", "v", {"hint": "zbv", "slack": None}),
    "sequence parallel, v": ("sequence", "v", {}),
    "dtensor, split": ("dtensor", "loop", {"split_backward": True}),
    "deterministic": ("", "loop", {"deterministic": True}),
    "sequence parallel, deterministic, v": ("sequence", "v", {"deterministic": True}),
}


@pytest.mark.parametrize("num_ranks", [2, 4], ids=["TP2 x V2", "TP2 x PP2 x V2"])
@pytest.mark.parametrize("name", CASES)
def test_gradients_of_two_stages_per_rank_equal_the_reference(name, num_ranks):
    answers = worker_group(num_ranks).values(run_chunks, *CASES[name])
    for error, _, _ in answers:
        assert error < 1e-4
    for member in range(0, num_ranks, 2):
        order = answers[member][1]
        assert order == answers[member + 1][1]
        assert len(order) == len(set(order)) >= 2 * NUM_CHUNKS * 6


@pytest.mark.parametrize("mode", ["", "sequence", "dtensor"])
def test_deterministic_steps_of_two_stages_per_rank_have_the_same_bits(mode):
    free = worker_group(4).values(run_chunks, mode, "loop", {"deterministic": True})
    fixed = worker_group(4).values(
        run_chunks, mode, "loop", {"deterministic": True, "hint": "interleaved", "slack": 0}
    )
    assert [bits for _, _, bits in free] == [bits for _, _, bits in fixed]
