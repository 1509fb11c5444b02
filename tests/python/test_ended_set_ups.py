"""How set-ups end that cannot succeed, and how several of one process keep out of each other's way.

Would catch: a rank that ends, and the store with it, before the others have read why; absent ranks
that are not named; a set-up that waits for one of other ranks in another thread, or for its own
thread.
"""

import itertools
import logging
import signal
import sys
import threading
import time

import pytest
import torch
from parity_group import worker_group
from torch import nn

import rrfp
from rrfp import build_turns, process_session, rendezvous, set_up_watch
from rrfp.build_turns import build_turn
from rrfp.rendezvous import Rendezvous
from rrfp.session import open_sessions

WIDTH, M = 4, 2


def batch():
    return [torch.ones(2, WIDTH)] * M


def run(stage, rank, num_ranks, **options):
    return rrfp.run_pipeline(
        {rank: stage}, batch() if rank == 0 else None, batch() if rank == num_ranks - 1 else None,
        nn.functional.mse_loss, **{"stall_timeout_s": 60.0, **options},
    )


def open_refused(rank, num_ranks, slow):
    """When this rank read the last card, and when its call ended."""
    plain_get, read_s = Rendezvous._get, []

    def slow_get(self, name, of_rank, watch=None):
        if name.startswith("exchange") and of_rank == num_ranks - 1 and rank == slow:
            time.sleep(0.4)
        card = plain_get(self, name, of_rank, watch)
        read_s.append(time.monotonic())
        return card

    Rendezvous._get = slow_get
    try:
        with pytest.raises(ValueError, match="different values of placement"):
            rrfp.Pipeline({rank: nn.Linear(WIDTH, WIDTH)}, set_up_timeout_s=60.0,
                          placement="nowhere" if rank == 1 else "loop")
    finally:
        Rendezvous._get = plain_get
    return read_s[-1], time.monotonic()


@pytest.mark.parametrize("slow", range(2))
def test_nobody_ends_a_refused_set_up_before_the_others_have_heard(slow):
    """Who is first may hold the store in which they read it, and end with the error."""
    times_s = worker_group(2).values(open_refused, slow)
    assert min(end_s for _, end_s in times_s) >= max(read_s for read_s, _ in times_s), times_s


def open_alone(rank, num_ranks):
    """What rank 0, alone, is told of the others: in a set-up, and in a step."""
    told = []
    if rank == 0:
        with pytest.raises(rrfp.RankTimeoutError) as late:
            rrfp.Pipeline({0: nn.Linear(WIDTH, WIDTH)}, set_up_timeout_s=0.5)
        told.append((str(late.value), late.value.rank))
    torch.distributed.barrier()
    pipeline = rrfp.Pipeline({rank: nn.Linear(WIDTH, WIDTH)}, set_up_timeout_s=60.0)
    if rank == 0:
        with pytest.raises(rrfp.RankTimeoutError) as late:
            pipeline.step(batch(), stall_timeout_s=0.5)
        told.append((str(late.value), late.value.rank))
    torch.distributed.barrier()
    pipeline.close()
    return told


def test_every_absent_rank_is_named():
    (set_up, step), *_ = worker_group(3).values(open_alone)
    named = "rank 1 (global rank 1), rank 2 (global rank 2) did not join the pipeline within 0.5 s"
    assert named in set_up[0] and set_up[1] == 1, set_up
    assert "rank 1, rank 2 did not enter step 0 within 0.5 s" in step[0] and step[1] == 1, step


def open_without_a_thread(rank, num_ranks):
    """What the ranks are told when rank 0 gets no thread for its session; then all is well."""
    def refuse(*_):
        raise RuntimeError("can't start new thread")

    before = set(open_sessions())
    with pytest.MonkeyPatch.context() as patched:
        if rank == 0:
            patched.setattr(process_session, "EndWatch", refuse)
        with pytest.raises(RuntimeError) as error:
            rrfp.Pipeline({rank: nn.Linear(WIDTH, WIDTH)}, set_up_timeout_s=60.0)
    assert set(open_sessions()) <= before
    torch.distributed.barrier()
    run(nn.Linear(WIDTH, WIDTH), rank, num_ranks)
    return str(error.value)


def test_a_session_that_gets_no_thread_is_told_at_once():
    own, told = worker_group(2).values(open_without_a_thread)
    assert own == "can't start new thread"
    assert "rank 0 left it with RuntimeError" in told


def step_late(rank, num_ranks):
    """What the others are told of rank 1, which comes late to the first step."""
    pipeline = rrfp.Pipeline({rank: nn.Linear(WIDTH, WIDTH)}, set_up_timeout_s=60.0)
    told = ""
    if rank != 1:
        with pytest.raises(rrfp.RankTimeoutError) as late:
            pipeline.step(batch() if rank == 0 else None, batch() if rank == 2 else None,
                          nn.functional.mse_loss, stall_timeout_s=1.0)
        told = str(late.value)
    torch.distributed.barrier()
    pipeline.close()
    return told


def test_a_rank_that_waits_for_a_step_is_not_told_to_be_outside():
    """Also when another rank's word came after the time was over."""
    told = worker_group(3).values(step_late)
    for text in (told[0], told[2]):
        assert "rank 1 did not enter step 0 within 1 s of rank 0" in text, told
        assert "raise stall_timeout_s. Rank 0 (which says this) is entering the first step" in text
        assert "Rank 2 is entering the first step" in text, told


def run_interrupted(rank, num_ranks):
    """Rank 0 is called again by a signal while it sets up; what that call said."""
    stage, said, plain_get = nn.Linear(WIDTH, WIDTH), [], Rendezvous._get

    def handle(*_):
        try:
            run(stage, rank, num_ranks)
        except rrfp.RrfpError as error:
            said.append(str(error))

    def signalled_get(self, *args):
        if not said:
            signal.raise_signal(signal.SIGALRM)
        return plain_get(self, *args)

    before = signal.signal(signal.SIGALRM, handle)
    if rank == 0:
        Rendezvous._get = signalled_get
    try:
        run(stage, rank, num_ranks)
    finally:
        Rendezvous._get = plain_get
        signal.signal(signal.SIGALRM, before)
    return said


def test_a_signal_handler_that_sets_the_same_up_is_refused():
    """Its thread is in the set-up that it would wait for."""
    (said,), others = worker_group(2).values(run_interrupted)
    assert "the same thread sets a pipeline of these ranks up" in said and others == []


def run_crosswise(rank, num_ranks):
    """Two pipelines in two threads, which ranks 0 and 1 set up in opposite orders."""
    pair = torch.distributed.new_group([0, 1])
    errors = []

    def run_one(group, num_ranks):
        try:
            run(nn.Linear(WIDTH, WIDTH), rank, num_ranks, group=group, stall_timeout_s=20.0)
        except Exception as error:
            errors.append(repr(error))

    order = [(pair, 2), (None, 3)][:: -1 if rank == 1 else 1]
    if rank == 2:
        order = [(None, 3)]
    threads = []
    for arguments in order:
        threads.append(threading.Thread(target=run_one, args=arguments))
        threads[-1].start()
        time.sleep(0.3)
    for thread in threads:
        thread.join()
    return errors


def test_set_ups_of_different_ranks_do_not_wait_for_each_other():
    assert worker_group(3).values(run_crosswise) == [[], [], []]


def test_a_wait_for_another_thread_ends_in_time():
    """Of the same ranks: bounded by the time-out of who waits, and none for what is there."""
    with build_turn((0, 1), 60.0):
        told = []

        def wait():
            try:
                with build_turn((0, 1), 0.2):
                    pass
            except rrfp.RankTimeoutError as error:
                told.append(str(error))

        thread = threading.Thread(target=wait)
        thread.start()
        thread.join(60.0)
        assert told and "another thread of this process" in told[0] and "0.2 s" in told[0]
        with build_turn((0, 1, 2), 60.0):
            pass
    with build_turn((0, 1), 60.0) as left_s:
        assert left_s > 0


def test_an_interrupt_gives_the_turn_back():
    """Wherever it comes: after each line of it in turn."""
    for last in itertools.count(1):
        place, num_lines = (last, -1), 0

        def trace(frame, event, _, last=last):
            nonlocal num_lines
            if frame.f_code.co_filename != build_turns.__file__:
                return None
            num_lines += event == "line"
            if num_lines == last and event == "line":
                raise KeyboardInterrupt
            return trace

        was_interrupted = False
        sys.settrace(trace)
        try:
            with build_turn(place, 60.0):
                pass
        except KeyboardInterrupt:
            was_interrupted = True
        finally:
            sys.settrace(None)
        with build_turn(place, 1.0):
            pass
        if not was_interrupted:
            break
    assert last > 8


def run_slowly(rank, num_ranks):
    """What rank 0 logs while it waits for rank 1: in a set-up, and before a step."""
    told = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())
    logging.getLogger("rrfp").addHandler(handler)
    before = rendezvous.TELL_AFTER_S, set_up_watch.TELL_AFTER_S
    rendezvous.TELL_AFTER_S = set_up_watch.TELL_AFTER_S = 0.2
    try:
        stage = nn.Linear(WIDTH, WIDTH)
        for _ in range(2):
            torch.distributed.barrier()
            if rank == 1:
                time.sleep(1.5)
            run(stage, rank, num_ranks)
    finally:
        rendezvous.TELL_AFTER_S, set_up_watch.TELL_AFTER_S = before
        logging.getLogger("rrfp").removeHandler(handler)
    return told


def test_a_long_wait_for_a_rank_is_told_before_it_ends():
    told, _ = worker_group(2).values(run_slowly)
    assert sum("rank 0 has waited 0.2 s for rank 1 (global rank 1) to set up" in text
               for text in told) == 1, told
    assert sum("rank 0 has waited 0.2 s for the word of rank 1 on step 1" in text
               for text in told) == 1, told


ENDLESS = {
    "costs": {"costs": itertools.count()},
    "loss_reduction": {"loss_reduction": itertools.repeat(1.0)},
    "microbatch_order": {"microbatch_order": itertools.count()},
    "of a callable": {"microbatch_order": lambda _: itertools.count(), "costs": [1.0] * M},
    "loss_stages": {"loss_stages": itertools.repeat(1)},
    "hint": {"hint": {0: itertools.repeat("0F0"), 1: ["1F0"]}},
    "tied": {"tied": itertools.repeat((0, "weight"))},
}


@pytest.mark.parametrize("name", ENDLESS)
def test_an_iterator_without_an_end_is_refused(name):
    stages = [nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)]
    with pytest.raises(ValueError, match="gives more than 1,048,576 items"):
        rrfp.run_pipeline(stages, batch(), batch(), nn.functional.mse_loss, **ENDLESS[name])
