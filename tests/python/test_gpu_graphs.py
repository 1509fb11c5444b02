"""Several stages on a rank and graphs of stages, on GPUs, compared with a plain loop on the CPU.

Would catch: an input of a rank's own stage taken before it was computed, consumers that see each
other's in-place writes, the two halves of a backward on different streams, an edge's messages
taken for another's.
"""

import random

import pytest
import torch
from gpu_graph import run_part
from gpu_launch import NUM_GPUS, check_launch, two_gpus
from graph_parity import chain_case, check, draw_case

import rrfp

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(NUM_GPUS == 0, reason="needs a CUDA device"),
]
NUM_SEEDS = 40


def run_here(case, num_gpus):
    """All ranks in this process, rank r on GPU r mod ``num_gpus``."""
    devices = {s: torch.device("cuda", r % num_gpus) for s, r in enumerate(case.rank_of_stage)}
    try:
        check(case, [run_part(case, devices, lists_all=True)])
    except Exception as error:
        raise AssertionError(f"seed {case.seed}, {case}: {error}") from error


@pytest.mark.parametrize("offset", range(NUM_SEEDS))
def test_random_graphs_on_one_gpu(offset, seed):
    run_here(draw_case(seed + offset), 1)


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("offset", range(4))
def test_two_stages_per_rank(num_ranks, offset, seed):
    run_here(chain_case(random.Random(seed + offset), seed + offset, num_ranks), 1)


@two_gpus
@pytest.mark.parametrize("offset", range(NUM_SEEDS // 2))
def test_random_graphs_on_two_gpus(offset, seed):
    run_here(draw_case(seed + 1000 + offset), 2)


@two_gpus
@pytest.mark.parametrize("transport", ["ipc", "nccl"])
def test_random_graphs_with_a_process_per_gpu(transport, seed):
    check_launch(2, "--transport", transport, "--graphs", "12", "--seed", str(seed))


@pytest.mark.parametrize("transport", ["ipc", "nccl"])
def test_random_graphs_of_processes_that_share_gpus(transport, seed):
    check_launch(3, "--transport", transport, "--graphs", "4", "--seed", str(seed))


@two_gpus
@pytest.mark.parametrize("placement", ["loop", "v"])
@pytest.mark.parametrize("transport", ["ipc", "nccl"])
def test_two_stages_on_each_of_two_gpus(transport, placement):
    check_launch(2, "--transport", transport, "--placement", placement, "--stages-per-rank", "2",
                 "--steps", "12", "--dtype", "bfloat16")


@two_gpus
@pytest.mark.parametrize("stages", ["1", "2"])
@pytest.mark.parametrize("num_processes", [2, 4])
def test_tensor_parallel_stages(num_processes, stages):
    """Two processes: a pipeline of one rank each, joined in every task; four: two ranks each."""
    check_launch(num_processes, "--stages-per-rank", stages, program="gpu_tensor_parallel.py")


@two_gpus
def test_tensor_parallel_stages_with_one_connection():
    check_launch(2, "--stages-per-rank", "2", program="gpu_tensor_parallel.py",
                 CUDA_DEVICE_MAX_CONNECTIONS="1")


@two_gpus
def test_two_gpus_on_a_rank_are_refused():
    stages = [torch.nn.Linear(2, 2, device=f"cuda:{device}") for device in (0, 1)]
    with pytest.raises(ValueError, match="rank 0 has stage 0 on cuda:0 and stage 1 on cuda:1"):
        rrfp.run_pipeline(stages, [torch.ones(1, 2)], [None], lambda o, _: o.sum(), num_ranks=1)
