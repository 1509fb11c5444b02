"""What ranks tell one another arrives as it was: the shape of a loss, an order drawn, a refusal.

Would catch: losses that lose a dimension on their way, iterators compared by what they are, ranks
that wait for one that was refused before its set-up.
"""

import itertools

import pytest
import torch
from parity_group import worker_group
from torch import nn

import rrfp
from rrfp.session import open_sessions

M, P = 4, 2


def run(rank, loss_fn, **options):
    torch.manual_seed(rank)
    stage = nn.Linear(4, 4, dtype=torch.float64)
    inputs = [torch.full((2, 4), float(m), dtype=torch.float64) for m in range(M)]
    is_first, is_last = rank == 0, rank == P - 1
    result = rrfp.run_pipeline(
        stage, inputs if is_first else None, inputs if is_last else None, loss_fn,
        broadcast_loss=True, stall_timeout_s=60.0, **options,
    )
    return [(str(x.dtype), tuple(x.shape), x.item()) for x in result.losses]


def run_shaped(rank, num_ranks, shape):
    return run(rank, lambda y, t: (y - t).square().mean().reshape(shape))


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_a_broadcast_loss_keeps_its_shape(shape):
    first, last = worker_group(P).values(run_shaped, shape)
    assert first == last and {s for _, s, _ in last} == {shape}, (first, last)


def run_drawn(rank, num_ranks, order):
    return run(rank, nn.functional.mse_loss, microbatch_order=(m for m in order))


def test_an_order_of_microbatches_may_be_drawn():
    orders = [worker_group(P).values(run_drawn, order) for order in ([0, 1, 2, 3], [3, 1, 0, 2])]
    assert orders[0] == orders[1]  # results come in the caller's order
    answers = worker_group(P).run(run_drawn, [3, 1, 0])
    assert {answer.error_type for answer in answers} == {"ValueError"}, answers
    assert all("microbatch_order is [3, 1, 0]" in answer.error_text for answer in answers)


def open_with_one_wrong_time_out(rank, num_ranks):
    timeout_s = -1.0 if rank == 1 else 60.0
    rrfp.Pipeline({rank: nn.Linear(4, 4)}, set_up_timeout_s=timeout_s)


def test_one_wrong_time_out_of_a_set_up_is_told():
    answers = worker_group(P).run(open_with_one_wrong_time_out)
    assert {answer.error_type for answer in answers} == {"ValueError"}, answers
    assert all("rank 1: set_up_timeout_s is -1.0" in answer.error_text for answer in answers)


def run_refused(rank, num_ranks, refused):
    """A good step, one with an argument of set-up that is wrong on one rank, and a good one."""
    stage = nn.Linear(4, 4)
    inputs = [torch.ones(2, 4)] * M if rank == 0 else None
    targets = [torch.ones(2, 4)] * M if rank == P - 1 else None
    told = None
    for agreement_group in (None, "nonne" if rank == refused else None, None):
        try:
            rrfp.run_pipeline(stage, inputs, targets, nn.functional.mse_loss,
                              agreement_group=agreement_group, stall_timeout_s=8.0)
        except ValueError as error:
            told = (type(error).__name__, str(error))
    return told


@pytest.mark.parametrize("refused", range(P))
def test_a_rank_that_is_refused_while_others_are_in_a_step(refused):
    """All hear why, and the next step runs: no rank keeps a pipeline that another has closed."""
    told = worker_group(P).values(run_refused, refused)
    assert len(set(told)) == 1 and told[0][0] == "RanksParted", told
    assert f"rank {refused}: agreement_group is 'nonne'" in told[0][1]


class Wordless(ValueError):
    def __str__(self):
        raise OSError("no words")


class Worded(ValueError):
    def __str__(self):
        class Text(str):  # of no module, so that it cannot be pickled
            pass

        return Text("words of its own")


class Unshown(list):
    def __repr__(self):
        raise OSError("not to be shown")


class Unsearchable(nn.Linear):
    def named_parameters(self, *args, **kwargs):
        raise AttributeError("nothing is named here")


def raising(error):
    yield (0, 1)
    raise error


ODD = {  # what rank 0 gives, what is odd on rank 1, and what all ranks hear
    "wordless": ({"edges": [(0, 1)]}, lambda: {"edges": raising(Wordless())},
                 "its description raised OSError"),
    "worded": ({"edges": [(0, 1)]}, lambda: {"edges": raising(Worded())}, "words of its own"),
    "endless": ({"edges": [(0, 1)]}, lambda: {"edges": itertools.repeat((0, 1))},
                "edges gives more than 1,048,576 items"),
    "unshown": ({"placement": [0, 1]}, lambda: {"placement": Unshown([0, 1])},
                "OSError: not to be shown"),
    "unsearchable": ({}, lambda: {"stages": Unsearchable(4, 4)},
                     "AttributeError: nothing is named"),
}


def run_odd(rank, num_ranks, name, is_kept):
    plain, odd, _ = ODD[name]
    options = odd() if rank == 1 else dict(plain)
    stage = options.pop("stages", None) or nn.Linear(4, 4)
    if is_kept:
        rrfp.Pipeline({rank: stage}, set_up_timeout_s=20.0, **options)
    else:
        rrfp.run_pipeline({rank: stage}, [torch.ones(2, 4)] if rank == 0 else None,
                          forward_only=True, stall_timeout_s=20.0, **options)


@pytest.mark.parametrize("is_kept", [True, False], ids=["Pipeline", "run_pipeline"])
@pytest.mark.parametrize("name", ODD)
def test_what_raises_when_it_is_looked_at_is_told(name, is_kept):
    answers = worker_group(P).run(run_odd, name, is_kept)
    assert {answer.error_type for answer in answers} == {"ValueError"}, answers
    assert all(f"rank 1: {ODD[name][2]}" in answer.error_text for answer in answers), answers


def open_in_two_groups(rank, num_ranks, wrong):
    pipelines = [torch.distributed.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    members = [torch.distributed.new_group(ranks) for ranks in ([0, 2], [1, 3])]
    edges = raising(KeyError("a cause of mine")) if rank == wrong else [(0, 1)]
    rrfp.Pipeline({rank % 2: nn.Linear(4, 4)}, group=pipelines[rank // 2], edges=edges,
                  agreement_group=members[rank % 2], set_up_timeout_s=20.0)


@pytest.mark.parametrize("wrong", [0, 3])
def test_members_of_the_agreement_group_are_told_too(wrong):
    """Also those in another pipeline, which is right in itself."""
    answers = worker_group(4).run(open_in_two_groups, wrong)
    assert {answer.error_type for answer in answers} == {"ValueError"}, answers
    assert all("a cause of mine" in answer.error_text for answer in answers), answers


def run_with_new_texts(rank, num_ranks):
    """The number of pipelines after steps whose ``agreement_group`` is another object each time."""
    stage, inputs, kept = nn.Linear(4, 4), [torch.ones(2, 4)], []
    for _ in range(5):
        kept.append("NONE".lower())
        rrfp.run_pipeline({rank: stage}, inputs if rank == 0 else None, forward_only=True,
                          agreement_group=kept[-1], stall_timeout_s=60.0)
    return len({id(text) for text in kept}), len(list(open_sessions()))


def test_a_text_is_the_same_whichever_object_holds_it():
    before = worker_group(P).values(open_now)
    for (num_texts, num_open), already in zip(
        worker_group(P).values(run_with_new_texts), before, strict=True
    ):
        assert num_texts == 5 and num_open <= already + 1


def open_now(rank, num_ranks):
    return len(list(open_sessions()))


def open_in_opposite_order(rank, num_ranks):
    groups = [torch.distributed.new_group([0, 1]) for _ in range(2)]
    for group in groups[::-1] if rank else groups:
        rrfp.Pipeline({rank: nn.Linear(4, 4)}, group=group, set_up_timeout_s=60.0)


def test_groups_of_the_same_ranks_are_not_taken_for_one_another():
    """Pipelines that are built in another order on each rank would join each other's stages."""
    answers = worker_group(P).run(open_in_opposite_order)
    assert {answer.error_type for answer in answers} == {"ValueError"}, answers
    assert all("different process groups of the same ranks" in a.error_text for a in answers)


def refused_after_others_left(rank, num_ranks):
    """Rank 0 is refused while rank 1 is not there yet; both leave the others' set-up too late."""
    groups = [torch.distributed.new_group(ranks)
              for ranks in ([0, 1], [2, 3], [0, 2], [1, 3], [1, 2, 3])]
    options = {"group": groups[rank // 2], "agreement_group": groups[2 + rank % 2]}
    stage, wrong = {rank % 2: nn.Linear(4, 4)}, {"edges": raising(KeyError())} if rank == 0 else {}
    if rank == 1:
        torch.distributed.barrier(groups[4])
    with pytest.raises((ValueError, rrfp.RankTimeoutError)):
        rrfp.Pipeline(stage, set_up_timeout_s=60.0 if rank < 2 else 2.0, **options, **wrong)
    if rank > 1:
        torch.distributed.barrier(groups[4])
    torch.distributed.barrier()
    rrfp.Pipeline(stage, set_up_timeout_s=60.0, **options).close()
    return "joined"


def test_a_refusal_that_comes_too_late_spoils_no_later_set_up():
    assert worker_group(4).values(refused_after_others_left) == ["joined"] * 4
