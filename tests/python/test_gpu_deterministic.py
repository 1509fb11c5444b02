"""``deterministic=True`` on GPUs: parameter gradients to the last bit, and where the promise ends.

Stages keep their devices busy for random times, so that messages come in many orders. The oracle
is a plain loop over the microbatches on the same GPU. Would catch: gradients added in the order
of arrival, a mask that depends on when its task ran.
"""

import os
import random

import pytest
import torch
from gpu_graph import run_part
from gpu_launch import NUM_GPUS, check_launch, two_gpus
from gpu_model import check_close, gradients_of, loss_fn, make_batch, make_stages, plain_loop
from graph_parity import finish_case

import rrfp

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # the same sums on every stream
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(NUM_GPUS == 0, reason="needs a CUDA device"),
]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
BUSY_CYCLES = 200_000


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize(
    ("num_stages", "options"),
    [
        (4, {}),
        (4, {"hint": "bfw", "max_in_flight": 2}),
        (4, {"split_backward": False}),
        (4, {"placement": "v", "num_ranks": 2, "hint": "zbv"}),
        (6, {"num_ranks": 3, "hint": "interleaved", "slack": 0}),
    ],
    ids=["auto", "bfw", "full", "zbv", "fixed"],
)
def test_the_bits_of_a_plain_loop(num_stages, options, dtype, seed):
    """12 shuffled steps per case, 120 in all."""
    stages = make_stages(seed, ["cuda:0"] * num_stages, dtype, BUSY_CYCLES)
    reference = make_stages(seed, ["cuda:0"] * num_stages, dtype)
    orders = set()
    for step in range(12):
        inputs, targets = make_batch(seed + step, 6, "cuda:0", dtype)
        for stage in stages:
            stage.zero_grad()
        result = rrfp.run_pipeline(
            stages, inputs, targets, loss_fn, deterministic=True,
            lookahead=("jit", "eager", 1)[step % 3], **options,
        )
        orders.add(tuple(" ".join(rank.order) for rank in result.report.ranks))
        _, gradients = plain_loop(reference, inputs, targets)
        for index, (stage, expected) in enumerate(zip(stages, gradients, strict=True)):
            try:
                check_close(gradients_of(stage), expected, None)
            except AssertionError as error:
                raise AssertionError(f"stage {index}, step {step}, seed {seed}: {error}") from error
    if options.get("slack") != 0:
        assert len(orders) > 1, "nothing was shuffled"


@two_gpus
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("arguments", [(), ("--stages-per-rank", "2", "--placement", "v")],
                         ids=["chain", "v"])
def test_processes_with_dropout(arguments, dtype):
    check_launch(2, "--deterministic", "--dropout", "0.3", "--dtype", dtype, "--steps", "16",
                 *arguments, CUBLAS_WORKSPACE_CONFIG=":4096:8")


def run_graph(num_consumers, seed, **options):
    """(gradients of the first stage in a deterministic run, in a plain loop on the GPU)."""
    edges = [(0, s) for s in range(1, num_consumers + 1)]
    ranks = tuple(range(num_consumers + 1))
    case = finish_case(random.Random(seed), seed, edges, ranks, ranks, list(ranks[1:]), ["bf"])
    devices = {stage: torch.device("cuda:0") for stage in ranks}
    options = {"deterministic": True, "slack": "auto", "max_in_flight": None, **options}
    found, _ = run_part(case, devices, lists_all=True, **options)
    return case, found[0][1]


def plain_gradients(case):
    from graph_parity import Node, batch
    from graph_parity import loss_fn as graph_loss

    stages = [Node(case, index).to("cuda:0") for index in range(case.num_stages)]
    inputs, targets = batch(case)
    for microbatch, value in enumerate(inputs):
        output = stages[0](value.to("cuda:0"))
        losses = [
            graph_loss(stages[stage](output.clone()), targets[stage][microbatch].to("cuda:0"))
            for stage in case.loss_stages
        ]
        sum(loss / case.num_microbatches for loss in losses).backward()
    return {name: parameter.grad.cpu() for name, parameter in stages[0].named_parameters()}


def is_same(got, expected):
    return all(torch.equal(got[name], expected[name]) for name in expected)


def test_two_consumers_have_the_bits_of_a_plain_loop(seed):
    for offset in range(6):
        case, found = run_graph(2, seed + offset)
        if 0 not in case.frozen:
            assert is_same(found, plain_gradients(case)), f"seed {seed + offset}"


def test_three_consumers_have_the_bits_of_a_fixed_order(seed):
    """Three gradients are added in the order of stages; autograd adds them in another one."""
    differs = 0
    for offset in range(8):
        case, found = run_graph(3, seed + offset)
        if 0 in case.frozen:
            continue
        _, fixed = run_graph(3, seed + offset, slack=0)
        assert is_same(found, fixed), f"seed {seed + offset}"
        differs += not is_same(found, plain_gradients(case))
    assert differs > 0, "the exception that the documents state was not seen"
