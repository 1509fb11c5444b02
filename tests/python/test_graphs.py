"""Several stages per rank and graphs of stages give a plain loop's gradients.

Would catch: a gradient of one consumer lost or added twice; a join whose arguments are in order
of arrival; two consumers that share memory; a stage of the wrong rank; a deadlock.
"""

import os
from collections import Counter

import graph_parity
import pytest
import rrfp
import torch

DEFAULT_SEED = 20261128
SEED = int(os.environ.get("RRFP_SEED", DEFAULT_SEED))
NUM_IN_PROCESS, NUM_ACROSS, NUM_SLOW = 150, 60, 3000


@pytest.mark.parametrize("seed", range(SEED, SEED + NUM_IN_PROCESS))
def test_in_one_process(seed):
    graph_parity.run_case(graph_parity, graph_parity.draw_case(seed), in_process=True)


@pytest.mark.parametrize("seed", range(SEED, SEED + NUM_ACROSS))
def test_across_processes(seed):
    case = graph_parity.draw_case(seed, num_ranks=2 + seed % 3)
    graph_parity.run_case(graph_parity, case, in_process=False)


@pytest.mark.slow
@pytest.mark.parametrize("chunk", range(20))
def test_thousands(chunk):
    first = SEED + 10_000 + chunk * NUM_SLOW // 20
    for seed in range(first, first + NUM_SLOW // 20):
        case = graph_parity.draw_case(seed, num_ranks=1 + seed % 4)
        graph_parity.run_case(graph_parity, case, in_process=seed % 8 < 4 or case.num_ranks == 1)


def test_cases_are_varied(capsys):
    """Those of the default seed: of some others a count is a little lower."""
    seeds = range(DEFAULT_SEED, DEFAULT_SEED + NUM_IN_PROCESS)
    cases = [graph_parity.draw_case(seed) for seed in seeds]
    counts = Counter()
    for case in cases:
        counts["joins"] += any(len(case.sources_of(s)) > 1 for s in range(case.num_stages))
        consumers = Counter(source for source, _ in case.edges)
        counts["several consumers"] += max(consumers.values()) > 1
        counts["several losses"] += len(case.loss_stages) > 1
        counts["loss with consumers"] += any(s in consumers for s in case.loss_stages)
        counts["several sources"] += sum(
            not case.sources_of(s) for s in range(case.num_stages)) > 1
        counts["frozen"] += bool(case.frozen)
        counts["split"] += case.split is True
        counts["deterministic"] += case.deterministic
        counts[f"placement {case.placement if isinstance(case.placement, str) else 'list'}"] += 1
    with capsys.disabled():
        print(f"\ngraphs: seed {DEFAULT_SEED}, {dict(counts)}")
    assert all(count >= 10 for count in counts.values()) and len(counts) == 11


class Add(torch.nn.Module):
    def forward(self, *values):
        return sum(values)


def test_join_gets_its_groups_in_stage_order():
    class Pair(torch.nn.Module):
        def forward(self, value):
            return value, 10 * value

    class Join(torch.nn.Module):
        def forward(self, *values):
            self.seen = [float(value) for value in values]
            return sum(values) * torch.ones((), requires_grad=True)

    class Times(torch.nn.Module):
        def forward(self, value):
            return 3 * value

    join = Join()
    rrfp.run_pipeline(
        [Pair(), Times(), join],
        {0: [torch.tensor(1.0)], 1: [torch.tensor(7.0)]},
        [0.0],
        lambda out, _: out,
        edges=[(1, 2), (0, 2)],
    )
    assert join.seen == [1.0, 10.0, 21.0]


def test_losses_and_targets_by_stage():
    stages = [torch.nn.Linear(2, 2), torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)]
    inputs = [torch.randn(3, 2) for _ in range(4)]
    result = rrfp.run_pipeline(
        stages, inputs, {1: [1.0] * 4, 2: [2.0] * 4},
        {1: lambda out, t: (out - t).square().mean(), 2: lambda out, t: (out * t).mean()},
        edges=[(0, 1), (0, 2)], return_outputs=True,
    )
    assert sorted(result.losses) == [1, 2]
    for m, value in enumerate(inputs):
        hidden = stages[0](value)
        assert torch.allclose(result.losses[1][m], (stages[1](hidden) - 1).square().mean())
        assert torch.allclose(result.losses[2][m], (stages[2](hidden) * 2).mean())
        assert torch.allclose(result.outputs[2][m], stages[2](hidden))


@pytest.mark.parametrize(("edges", "apart"), [([(0, 1)], 2), ([(0, 2)], 1), ([(1, 2)], 0), ([], 0)])
def test_a_stage_in_no_edge_must_have_a_loss_by_name(edges, apart):
    """An edge that was forgotten must not make two models of one."""
    stages = [torch.nn.Linear(2, 2) for _ in range(3)]
    inputs = [torch.randn(3, 2) for _ in range(4)]
    with pytest.raises(ValueError, match=f"stage {apart} stands in no edge of edges"):
        rrfp.run_pipeline(stages, inputs, inputs, lambda out, t: (out - t).sum(), edges=edges)
    with pytest.raises(ValueError, match="stage [01] stands in no edge of edges"):
        rrfp.run_pipeline(stages, inputs, inputs, lambda out, t: (out - t).sum(), edges=edges[:0],
                          loss_stages=[2])


@pytest.mark.parametrize("inputs_of", [lambda batch, other: batch,
                                       lambda batch, other: {0: batch, 2: other}])
def test_a_stage_that_stands_apart_trains_beside_the_others(inputs_of):
    """Models side by side, such as teachers of several sizes: each gets its microbatches."""
    stages, plain = ([torch.nn.Linear(2, 2, dtype=torch.float64) for _ in range(3)]
                     for _ in range(2))
    for ours, theirs in zip(stages, plain, strict=True):
        theirs.load_state_dict(ours.state_dict())
    batch, other = (torch.randn(4, 3, 2, dtype=torch.float64).unbind() for _ in range(2))
    inputs = inputs_of(batch, other)
    result = rrfp.run_pipeline(stages, inputs, [None] * 4, lambda out, _: out.square().mean(),
                               edges=[(0, 1)], loss_stages=[1, 2], loss_reduction="sum")
    for m, value in enumerate(batch):
        apart = inputs[2][m] if isinstance(inputs, dict) else value
        losses = {1: plain[1](plain[0](value)).square().mean(), 2: plain[2](apart).square().mean()}
        sum(losses.values()).backward()
        for stage, loss in losses.items():
            torch.testing.assert_close(result.losses[stage][m], loss.detach())
    for ours, theirs in zip(stages, plain, strict=True):
        torch.testing.assert_close(ours.weight.grad, theirs.weight.grad, rtol=1e-11, atol=1e-12)


def test_one_stage_needs_no_edge():
    stage = torch.nn.Linear(2, 2)
    for edges in (None, []):
        result = rrfp.run_pipeline([stage], [torch.ones(1, 2)] * 2, [None] * 2,
                                   lambda out, _: out.sum(), edges=edges)
        assert len(result.losses) == 2


def test_a_source_without_microbatches_is_named():
    with pytest.raises(ValueError, match="microbatches is None for stage 1, a source stage"):
        rrfp.run_pipeline(
            [torch.nn.Linear(2, 2), torch.nn.Linear(2, 2), Add()],
            {0: [torch.ones(1, 2)]}, [0.0], lambda out, _: out.mean(), edges=[(0, 2), (1, 2)],
        )
