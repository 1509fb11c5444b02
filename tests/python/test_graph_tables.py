"""Graphs of stages with inputs by source, keyword arguments, weights, a scale, orders of
microbatches and auxiliary losses give a plain loop's losses, outputs and gradients.

Would catch: a table read by the place of a microbatch instead of its index, the inputs of another
source, keyword arguments of another stage, a weight that an auxiliary loss does not get.
"""

import os
from collections import Counter

import graph_parity
import graph_tables
import pytest
import torch

import rrfp

DEFAULT_SEED = 20261129
SEED = int(os.environ.get("RRFP_SEED", DEFAULT_SEED))
NUM_IN_PROCESS, NUM_ACROSS = 80, 30


@pytest.mark.parametrize("seed", range(SEED, SEED + NUM_IN_PROCESS))
def test_in_one_process(seed):
    graph_parity.run_case(graph_tables, graph_parity.draw_case(seed), in_process=True)


@pytest.mark.parametrize("seed", range(SEED, SEED + NUM_ACROSS))
def test_across_processes(seed):
    case = graph_parity.draw_case(seed, num_ranks=2 + seed % 2)
    graph_parity.run_case(graph_tables, case, in_process=False)


@pytest.mark.slow
@pytest.mark.parametrize("chunk", range(10))
def test_thousands(chunk):
    first = SEED + 10_000 + 200 * chunk
    for seed in range(first, first + 200):
        case = graph_parity.draw_case(seed, num_ranks=1 + seed % 4)
        graph_parity.run_case(graph_tables, case, in_process=seed % 8 < 4 or case.num_ranks == 1)


def test_cases_are_varied():
    """Those of the default seed: of some others a count is a little lower."""
    counts = Counter()
    for seed in range(DEFAULT_SEED, DEFAULT_SEED + NUM_IN_PROCESS):
        case = graph_parity.draw_case(seed)
        tables = graph_tables.Tables(case)
        counts["several sources"] += len(tables.inputs) > 1
        counts["keyword arguments"] += bool(tables.kwargs)
        counts["scaled"] += tables.grad_scale is not None
        counts[f"weights {tables.weights if isinstance(tables.weights, str) else 'list'}"] += 1
        counts[f"order {tables.order if isinstance(tables.order, str) else 'list'}"] += 1
        adds = [graph_tables.FullNode(case, s).adds for s in range(case.num_stages)]
        counts["auxiliary losses"] += any(adds)
        counts["frozen with one"] += any(adds[s] for s in case.frozen)
    print(f"seed {DEFAULT_SEED}: {dict(counts)}")
    assert all(count >= 5 for count in counts.values()) and len(counts) == 11


class Overwrites(torch.nn.Module):
    def forward(self, value):
        return value.zero_() + torch.ones((), requires_grad=True)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_outputs_of_a_loss_stage_are_its_own(num_ranks):
    """Its consumer writes into what it was handed; the outputs and the loss must not see it."""
    scale = torch.nn.Linear(1, 1, bias=False)
    result = rrfp.run_pipeline(
        [scale, Overwrites()], [torch.full((2, 1), 3.0)], {0: [None], 1: [None]},
        lambda output, _: output.square().sum(), loss_stages=[0, 1], return_outputs=True,
        num_ranks=num_ranks,
    )
    output = result.outputs[0][0]
    assert torch.equal(output, 3 * scale.weight.detach().expand(2, 1))
    assert not output.requires_grad
    assert scale.weight.grad.item() == pytest.approx(36 * scale.weight.item())
