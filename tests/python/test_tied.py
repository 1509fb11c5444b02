"""Tied parameters have the gradient of one shared parameter, in every copy.

Would catch: a copy's gradient lost or added twice, one that depends on the order of arrival, an
accumulated ``.grad`` that is summed again in the next step, a norm that counts copies, copies
that have drifted apart and train on, an exchange that never ends.
"""

import copy
import os
import re
import time

import graph_parity
import pytest
import tied_parity
import torch
from parity_group import worker_group
from tied_model import TIED, cross_entropy, language_model, tokens

import rrfp

SEED = int(os.environ.get("RRFP_SEED", "20261130"))
NUM_IN_PROCESS, NUM_ACROSS = 40, 24


def tied_case(seed, num_ranks=None):
    """The next case from the seed on that ties something."""
    while True:
        case = graph_parity.draw_case(seed, num_ranks)
        if tied_parity.groups_of(case):
            return case
        seed += 1_000_000


@pytest.mark.parametrize("seed", range(SEED, SEED + NUM_IN_PROCESS))
def test_in_one_process(seed):
    graph_parity.run_case(tied_parity, tied_case(seed), in_process=True)


@pytest.mark.parametrize("seed", range(SEED, SEED + NUM_ACROSS))
def test_across_processes(seed):
    graph_parity.run_case(tied_parity, tied_case(seed, num_ranks=2 + seed % 3), in_process=False)


@pytest.mark.slow
@pytest.mark.parametrize("chunk", range(10))
def test_thousands(chunk):
    first = SEED + 10_000 + 100 * chunk
    for seed in range(first, first + 100):
        case = tied_case(seed, num_ranks=2 + seed % 3)
        graph_parity.run_case(tied_parity, case, in_process=seed % 2 == 0)


def train(stages, rank, steps, tied, optimizer):
    """Losses of the last rank; clips and scales as a user does."""
    parameters = [p for stage in stages.values() for p in stage.parameters()]
    optimizer = optimizer(parameters, lr=0.05)
    scaler = rrfp.GradScaler(init_scale=16.0)
    losses, norms = [], []
    in_process = len(stages) == 3
    for _ in range(steps):
        optimizer.zero_grad()
        result = rrfp.run_pipeline(
            list(stages.values()) if in_process else stages, tokens() if 0 in stages else None,
            tokens() if 2 in stages else None, cross_entropy, tied=tied,
            grad_scale=scaler.get_scale(), stall_timeout_s=30.0, broadcast_loss=True,
        )
        scaler.unscale_(optimizer)
        norms.append(rrfp.clip_grad_norm_(parameters, 0.5).item())
        scaler.step(optimizer)
        scaler.update()
        losses.append(torch.stack(result.losses).mean().item())
    return losses, norms


def train_rank(rank, num_ranks, optimizer):
    everything = language_model()
    stages = {rank: everything[rank]} if num_ranks > 1 else dict(enumerate(everything))
    trained = train(stages, rank, 5, TIED, getattr(torch.optim, optimizer))
    return trained, {s: copy.deepcopy(m.state_dict()) for s, m in stages.items()}


def plain_training(optimizer):
    stages = language_model()
    stages[2].head.weight = stages[0].embed.weight
    model = torch.nn.Sequential(*stages)
    optimizer = getattr(torch.optim, optimizer)(model.parameters(), lr=0.05)
    losses, norms = [], []
    for _ in range(5):
        optimizer.zero_grad()
        raw = [cross_entropy(model(t), t) for t in tokens()]
        torch.stack(raw).mean().backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
        optimizer.step()
        losses.append(torch.stack(raw).mean().item())
    return losses, norms, stages


@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
@pytest.mark.parametrize("num_processes", [1, 3])
def test_a_tied_embedding_trains_as_a_shared_one(optimizer, num_processes):
    group = worker_group(num_processes, distributed=num_processes > 1)
    answers = group.values(train_rank, optimizer)
    losses, norms, stages = plain_training(optimizer)
    for (got_losses, got_norms), states in answers:
        assert got_losses == pytest.approx(losses, rel=1e-4)
        assert got_norms == pytest.approx(norms, rel=1e-4), "a tied weight counts once"
        for stage, state in states.items():
            for name, value in state.items():
                torch.testing.assert_close(value, stages[stage].state_dict()[name],
                                           rtol=1e-3, atol=1e-5)


def large_rank(rank, num_ranks):
    """Gradients of more than a few pieces; in the first steps some holders have none."""
    stages = language_model(rows=70_001, columns=8)
    stages[1].requires_grad_(False)
    embed, head = stages[0].embed, stages[2].head
    own = {rank: stages[rank]} if num_ranks > 1 else stages
    grads = []
    for missing in ("both", "head", "embed", None):
        stages[0].forward, stages[2].forward = embed.forward, head.forward
        if missing == "embed":
            stages[0].forward = lambda t: embed(t).detach()
        if missing == "head":
            stages[2].forward = lambda h: h @ head.weight.detach().t()
        rrfp.run_pipeline(
            own, tokens(70_001, 2) if rank == 0 else None,
            tokens(70_001, 2) if rank == num_ranks - 1 else None,
            cross_entropy if missing != "both" else
            lambda out, t: out.detach().sum() * torch.ones((), requires_grad=True),
            tied=TIED, stall_timeout_s=30.0,
        )
        grads.append({s: m.get_parameter(n).grad for s, n in TIED
                      for m in [stages[s]] if num_ranks == 1 or s == rank})
        embed.weight.grad = head.weight.grad = None
    return grads


def test_pieces_and_holders_without_gradients():
    (alone,) = worker_group(1, distributed=False).values(large_rank)
    answers = worker_group(3).values(large_rank)
    for step, reference in enumerate(alone):
        for by_rank in answers:
            for stage, gradient in by_rank[step].items():
                assert (gradient is None) == (reference[stage] is None) == (step == 0)
                assert step == 0 or torch.equal(gradient, reference[stage]), "bits of both modes"


def broken_rank(rank, num_ranks, kind):
    """Trains two steps; rank 2 does not take part in the second exchange."""
    from rrfp import tied_exchange

    run = tied_exchange.TiedExchange.run

    def fail(exchange):
        if kind == "raises":
            raise RuntimeError("broken on purpose")
        time.sleep(4.0)
        return run(exchange)

    stages = language_model()
    try:
        for step in range(2):
            if rank == 2 and step == 1:
                tied_exchange.TiedExchange.run = fail
            rrfp.run_pipeline(stages[rank], tokens() if rank == 0 else None,
                              tokens() if rank == 2 else None, cross_entropy, tied=TIED,
                              stall_timeout_s=1.0)
    finally:
        tied_exchange.TiedExchange.run = run


@pytest.mark.parametrize(("kind", "words"), [
    ("raises", "rank 2 ended with RuntimeError"),
    ("stays away", "Rank 0 .which says this. has run its tasks of step 1 and waits for what rank 2 "
                   "adds to the gradients of tied parameters"),
])
def test_an_exchange_that_cannot_end_is_told_on_every_rank(kind, words):
    answers = worker_group(3).run(broken_rank, kind)
    for rank, answer in enumerate(answers):
        assert "RrfpError" in answer.error_bases or (rank == 2 and kind == "raises"), answer
    assert re.search(words, answers[0].error_text), answers[0].error_text
    (value,) = set(worker_group(3).values(usable_rank))
    assert value == "trains"


def usable_rank(rank, num_ranks):
    stages = language_model()
    rrfp.run_pipeline(stages[rank], tokens() if rank == 0 else None,
                      tokens() if rank == 2 else None, cross_entropy, tied=TIED)
    return "trains"


def grouped_rank(rank, num_ranks):
    """Two pipelines of two stages whose ranks agree on the order of their tasks."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    stages = language_model()[::2]
    own = stages[rank // 2]
    for _ in range(2):
        rrfp.run_pipeline(own, tokens() if rank < 2 else None, tokens() if rank >= 2 else None,
                          cross_entropy, tied=[(0, "embed.weight"), (1, "head.weight")],
                          group=mesh, agreement_group="auto", stall_timeout_s=30.0)
    return next(own.parameters()).grad


def test_pipelines_in_agreement_tie_each_on_its_own():
    answers = worker_group(4).values(grouped_rank)
    embed, head = language_model()[::2]
    head.head.weight = embed.embed.weight
    for _ in range(2):
        for item in tokens():
            (cross_entropy(head(embed(item)), item) / 6).backward()
    for gradient in answers:
        torch.testing.assert_close(gradient, embed.embed.weight.grad)


def test_gradients_of_before_stay_in_their_memory():
    stages = language_model()
    flat = torch.full((stages[2].head.weight.numel(),), 3.0)
    stages[2].head.weight.grad = flat.view_as(stages[2].head.weight)
    stages[0].embed.weight.grad = torch.full_like(stages[0].embed.weight, 5.0)
    rrfp.run_pipeline(stages, tokens(), tokens(), cross_entropy, tied=TIED)
    assert stages[2].head.weight.grad.data_ptr() == flat.data_ptr()
    torch.testing.assert_close(flat.view(40, 8) - 3.0, stages[0].embed.weight.grad - 5.0)
    rrfp.run_pipeline(stages, tokens(), tokens(), cross_entropy, tied=TIED, forward_only=True)
    torch.testing.assert_close(flat.view(40, 8) - 3.0, stages[0].embed.weight.grad - 5.0)


def test_an_early_end_keeps_what_was_there():
    stages = language_model()
    stages[0].embed.weight.grad = torch.full_like(stages[0].embed.weight, 5.0)

    def broken(output, target):
        raise RuntimeError("broken on purpose")

    with pytest.raises(rrfp.StageError):
        rrfp.run_pipeline(stages, tokens(), tokens(), broken, tied=TIED)
    assert bool((stages[0].embed.weight.grad == 5.0).all())


def test_sparse_gradients_are_added():
    stages = language_model()
    stages[0].embed.sparse = True
    rrfp.run_pipeline(stages, tokens(), tokens(), cross_entropy, tied=TIED, loss_reduction="sum")
    shared = language_model()
    shared[2].head.weight = shared[0].embed.weight
    model = torch.nn.Sequential(*shared)
    sum(cross_entropy(model(t), t) for t in tokens()).backward()
    for stage, name in TIED:
        torch.testing.assert_close(stages[stage].get_parameter(name).grad,
                                   shared[0].embed.weight.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("tied", "words"), [
    ([(0, "embed.weight")], "at least two"),
    ([(0, "embed.weight"), (0, "embed.weight")], "twice"),
    ([[(0, "embed.weight"), (2, "head.weight")], [(1, "weight"), (2, "head.weight")]], "twice"),
    ([(0, "embed.weight"), (2, "weight")], "it has .'head.weight'."),
    ([(0, "embed.weight"), (1, "weight")], "differ in shape"),
    ([(0, "embed.weight"), (7, "head.weight")], "stages are 0 to 2"),
    ("embed.weight", "pass"),
    ([0, 1], "pass"),
    ({0: "embed.weight"}, "pass"),
])
def test_wrong_groups_are_refused_by_name(tied, words):
    with pytest.raises((ValueError, TypeError), match=words):
        rrfp.Pipeline(language_model(), tied=tied)


def test_copies_that_differ_are_refused():
    stages = language_model()
    with torch.no_grad():
        stages[2].head.weight[3, 4] += 1e-3
    with pytest.raises(ValueError, match=r"differ in value: .*embed.weight of stage 0 and .*head"):
        rrfp.Pipeline(stages, tied=TIED)
    stages = language_model()
    with rrfp.Pipeline(stages, tied=TIED) as pipeline:
        pipeline.step(tokens(), tokens(), cross_entropy)
        with torch.no_grad():
            stages[2].head.weight.mul_(1.5)
        with pytest.raises(ValueError, match="no longer equal"):
            pipeline.step(tokens(), tokens(), cross_entropy)
        with torch.no_grad():
            stages[0].embed.weight.mul_(1.5)
        stages[0].embed.weight.requires_grad_(False)
        with pytest.raises(ValueError, match="differ in requires_grad"):
            pipeline.step(tokens(), tokens(), cross_entropy)
        stages[0].embed.weight.requires_grad_(True)
        pipeline.step(tokens(), tokens(), cross_entropy)


def test_one_parameter_in_two_stages_is_told_about_tied():
    stages = language_model()
    stages[2].head.weight = stages[0].embed.weight
    with pytest.raises(ValueError, match=r"tied=\[\(0, 'embed.weight'\), \(2, 'head.weight'\)\]"):
        rrfp.Pipeline(stages)
