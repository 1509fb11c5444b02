"""Linked pipelines one rank of which comes late, while the others call again at once.

Would catch: pipelines of which one stage is linked to an attempt of the other that has ended, and
the next stage to the one after it, so that each attempt ends the following for ever; ranks that
come back from the same failure at different times, because one stays for another that has left.
"""

import time
from pathlib import Path

import pytest
import torch
from parity_group import worker_group
from torch import nn

import rrfp
from rrfp import _C, process_set_up, rendezvous
from rrfp.agreement_group import GroupSetUp
from rrfp.rendezvous import Rendezvous, membership

TIMEOUT_S, LATE_S, MOST_CALLS = 3.0, 5.6, 6
LONG_S = 20.0


def retry_late(rank, num_ranks, late):
    """The errors of a rank in pipelines (0, 1) and (2, 3) until its call succeeds."""
    pipelines = [torch.distributed.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    members = [torch.distributed.new_group(ranks) for ranks in ([0, 2], [1, 3])]
    stage, batch, said = nn.Linear(4, 4), [torch.ones(2, 4)] * 2, []
    torch.distributed.barrier()
    if rank == late:
        time.sleep(LATE_S)
    for _ in range(MOST_CALLS):
        try:
            rrfp.run_pipeline({rank % 2: stage}, batch if rank % 2 == 0 else None,
                              batch if rank % 2 else None, nn.functional.mse_loss,
                              group=pipelines[rank // 2], agreement_group=members[rank % 2],
                              stall_timeout_s=TIMEOUT_S)
            break
        except (rrfp.RrfpError, ValueError) as error:
            said.append(f"{type(error).__name__}: {error}")
    torch.distributed.barrier()
    return said


# With rank 0 late, rank 1 gives up after 3 s, and calls again 2 s later; rank 3 hears of it in its
# agreement group, while rank 2 waits in the other until after 8 s: there it meets rank 0, whose
# pipeline is in its next attempt by then.
@pytest.mark.parametrize("late", [0, 3])
def test_linked_pipelines_meet_again(late):
    """At once where nothing else is slow; else a wait may end once more."""
    said = worker_group(4).values(retry_late, late)
    assert any(said) and len(said[late]) <= 1 and max(map(len, said)) <= 3, said


def see_off_at_length(patched):
    """So that a wait for nothing is told from a slow machine."""
    patched.setattr(rendezvous, "_SEE_OFF_S", 2 * LONG_S)


def leave_one_passed_over(rank, num_ranks):
    """How long rank 0 stays in a set-up that rank 1 has passed over."""
    failed = None
    if rank == 0:
        with pytest.raises(rrfp.RrfpError), Rendezvous(membership(None), 60.0) as failed:
            raise rrfp.RrfpError("of the test")
    torch.distributed.barrier()
    later = Rendezvous(membership(None), 60.0) if rank == 1 else None
    torch.distributed.barrier()
    began_s = time.monotonic()
    if rank == 0:
        with pytest.MonkeyPatch.context() as patched:
            see_off_at_length(patched)
            failed.see_off(rrfp.RrfpError("of the test"))
    took_s = time.monotonic() - began_s
    torch.distributed.barrier()
    if later is not None:
        with pytest.raises(rrfp.RrfpError), later:  # so that the ranks stay in step
            raise rrfp.RrfpError("of the test")
    return took_s


def fail_after_forming(rank, num_ranks):
    """How long rank 1 stays in an agreement group that was formed, when its pipeline fails.

    Rank 0 would stay, which may hold the store.
    """
    pipelines = [torch.distributed.new_group([member]) for member in range(num_ranks)]
    options = {"group": pipelines[rank], "set_up_timeout_s": 60.0,
               "agreement_group": torch.distributed.new_group([0, 1])}
    began_s = time.monotonic()
    with pytest.MonkeyPatch.context() as patched:
        if rank == 1:
            see_off_at_length(patched)
            patched.setattr(process_set_up, "ProcessSession", None)
            with pytest.raises(TypeError, match="not callable"):
                rrfp.Pipeline({0: nn.Linear(4, 4)}, **options)
        else:
            rrfp.Pipeline({0: nn.Linear(4, 4)}, **options).close()
    return time.monotonic() - began_s


@pytest.mark.parametrize("fail", [leave_one_passed_over, fail_after_forming])
def test_nobody_stays_for_a_rank_that_has_left(fail):
    assert max(worker_group(2).values(fail)) < LONG_S


def refuse_on_the_second_stage(rank, num_ranks):
    """When this rank's call ended, and with what: the group of ranks 1 and 3 gets no memory, that
    of ranks 0 and 2 is formed, and rank 3 is slow to tell its pipeline. Of rank 3: when it did."""
    pipelines = [torch.distributed.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    members = [torch.distributed.new_group(ranks) for ranks in ([0, 2], [1, 3])]
    all_formed, told_s = process_set_up._all_formed, []

    def refuse(*_):
        raise RuntimeError("no memory, in the test")

    def slowly(*args):
        time.sleep(1.0)
        told_s.append(time.monotonic())
        return all_formed(*args)

    torch.distributed.barrier()
    with pytest.MonkeyPatch.context() as patched:
        if rank == 1:
            patched.setattr(_C, "make_agreement_segment", refuse)
        if rank == 3:
            patched.setattr(process_set_up, "_all_formed", slowly)
        with pytest.raises(ValueError) as error:
            rrfp.Pipeline({rank % 2: nn.Linear(4, 4)}, group=pipelines[rank // 2],
                          agreement_group=members[rank % 2], set_up_timeout_s=60.0)
    return told_s[0] if told_s else time.monotonic(), str(error.value)


def test_who_may_hold_the_store_stays_until_linked_pipelines_have_heard():
    ends = worker_group(4).values(refuse_on_the_second_stage)
    assert all("no memory, in the test" in text for _, text in ends), ends
    assert ends[0][0] > ends[3][0], ends


def leave_after_the_others_met(rank, num_ranks):
    """What rank 0 hears of rank 1, whose card it has read, and how long it took."""
    began_s = time.monotonic()
    with pytest.raises(rrfp.RrfpError) as error, Rendezvous(membership(None), 60.0) as meeting:
        if rank == 1:
            meeting.publish("card", "all is well")
        else:
            meeting.share("card", "all is well")
        torch.distributed.barrier()
        if rank == 1:
            raise rrfp.RrfpError("interrupted, in the test")
        meeting.share("what comes next", None)
    return str(error.value), time.monotonic() - began_s


def refuse_after_the_others_met(rank, num_ranks):
    """The same of a member of an agreement group that finds another group which names it."""
    pipelines = [torch.distributed.new_group([member]) for member in range(num_ranks)]
    options = {"group": pipelines[rank], "set_up_timeout_s": 60.0,
               "agreement_group": torch.distributed.new_group([0, 1])}
    has_said, began_s = Rendezvous._has_said, time.monotonic()

    def rival(group):
        if group.meeting.store.check([f"{group.meeting.corner}/outcome"]):
            raise ValueError("a rival, in the test")

    with pytest.MonkeyPatch.context() as patched:
        if rank == 1:  # looks for rivals, and reads no card
            patched.setattr(Rendezvous, "_has_said", lambda meeting, name, other:
                            name != "card" and has_said(meeting, name, other))
            patched.setattr(GroupSetUp, "_check_claims", rival)
        with pytest.raises(ValueError) as error:
            rrfp.Pipeline({0: nn.Linear(4, 4)}, **options)
    assert "memfd:rrfp" not in Path("/proc/self/maps").read_text()  # though the error is kept
    return str(error.value), time.monotonic() - began_s


@pytest.mark.parametrize("leave, word", [
    (leave_after_the_others_met, "rank 1 left it with RrfpError: interrupted, in the test"),
    (refuse_after_the_others_met, "a member of this rank's agreement group: a rival, in the test"),
])
def test_who_leaves_after_the_others_met_is_heard(leave, word):
    (said, took_s), _ = worker_group(2).values(leave)
    assert word in said and took_s < LONG_S, said
