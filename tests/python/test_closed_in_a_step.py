"""A session that is closed while its step is under way, by whom the step's thread cannot wait for.

Would catch: a core that is ended under the thread that steps (a crash), a lock that a signal's
handler waits for while its own thread holds it, a refusal that takes the messages of a running
step, and a report that lets another thread wait for it with Python's lock.
"""

import gc
import os
import queue
import random
import resource
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch
from parity_group import worker_group
from torch import nn

import rrfp
from rrfp.worker import RankStep, Worker

WIDTH, M, CLOSES = 4, 4, 15
LIMIT_S = 60.0


def batch():
    return [torch.ones(2, WIDTH)] * M


def open_one(rank, stage=None):
    return rrfp.Pipeline({rank: stage or nn.Linear(WIDTH, WIDTH)}, set_up_timeout_s=LIMIT_S)


def step(pipeline, rank, num_ranks, **options):
    return pipeline.step(
        batch() if rank == 0 else None, batch() if rank == num_ranks - 1 else None,
        nn.functional.mse_loss, **{"stall_timeout_s": LIMIT_S, **options},
    )


def close_at_a_moment(pipeline, how, delay_s):
    """Has the pipeline closed later, by another thread or by a signal that strikes this one."""
    if how == "thread":
        timer = threading.Timer(delay_s, pipeline.close)
        timer.start()
        return timer.join
    signal.signal(signal.SIGALRM, lambda *_: pipeline.close())
    signal.setitimer(signal.ITIMER_REAL, delay_s)
    return lambda: None


def close_often(rank, num_ranks, how, seed):
    """Which errors ended the steps."""
    rng, ended = random.Random(seed), []
    for _ in range(CLOSES):
        pipeline = open_one(rank)
        finish = None
        delay_s, closer = rng.uniform(0.001, 0.03), rng.randrange(num_ranks)
        try:
            if rank == closer:
                finish = close_at_a_moment(pipeline, how, delay_s)
            while True:
                step(pipeline, rank, num_ranks)
        except rrfp.RrfpError as error:
            ended.append(type(error).__name__)
        if finish is not None:
            finish()
        pipeline.close()
        torch.distributed.barrier()
    return ended


@pytest.mark.parametrize("how", ["thread", "signal"])
def test_closing_at_any_moment_ends_the_step_of_a_process(how, seed):
    for ended in worker_group(2).values(close_often, how, seed):
        assert ended == ["ClosedError"] * CLOSES, ended


class Closing(nn.Linear):
    """A stage that closes its own pipeline."""

    pipeline = None

    def forward(self, x):
        if self.pipeline is not None:
            self.pipeline.close()
        return super().forward(x)


def close_from_the_stage(rank, num_ranks):
    stage = Closing(WIDTH, WIDTH)
    pipeline = open_one(rank, stage)
    step(pipeline, rank, num_ranks)
    stage.pipeline = pipeline if rank == 0 else None
    with pytest.raises(rrfp.ClosedError):
        step(pipeline, rank, num_ranks)
    stage.pipeline = None
    torch.distributed.barrier()
    pipeline = open_one(rank, stage)
    result = step(pipeline, rank, num_ranks)
    pipeline.close()
    return result.losses is not None


def test_a_stage_may_close_its_pipeline():
    assert worker_group(2).values(close_from_the_stage) == [False, True]


class Asked(ValueError):
    """An error that closes the pipeline when it is described."""

    def __init__(self, pipeline):
        super().__init__()
        self.pipeline = pipeline

    def __str__(self):
        self.pipeline.close()
        return "asked"


def close_while_refusing(rank, num_ranks):
    def raising():
        yield torch.ones(2, WIDTH)
        raise Asked(pipeline)

    pipeline = open_one(rank)
    try:
        pipeline.step(raising() if rank == 0 else None, batch() if rank else None,
                      nn.functional.mse_loss, num_microbatches=M, stall_timeout_s=LIMIT_S)
    except (Asked, rrfp.RrfpError) as error:
        return type(error).__name__


def test_an_error_may_close_the_pipeline_while_it_is_told():
    assert worker_group(2).values(close_while_refusing) == ["Asked", "ClosedError"]


class Slow(nn.Linear):
    def forward(self, x):
        time.sleep(0.05)
        return super().forward(x)


def refuse_beside_a_step(rank, num_ranks):
    pipeline, told, stage = None, [], Slow(WIDTH, WIDTH)
    pipeline = open_one(rank, stage)

    def ask():
        time.sleep(0.05)
        try:
            step(pipeline, rank, num_ranks, hint="nonsense")
        except rrfp.RrfpError as error:
            told.append(str(error))

    asking = threading.Thread(target=ask)
    asking.start()
    step(pipeline, rank, num_ranks)
    asking.join()
    step(pipeline, rank, num_ranks)  # it is usable
    pipeline.close()
    return told


def test_wrong_arguments_of_a_second_thread_leave_the_step_alone():
    for told in worker_group(2).values(refuse_beside_a_step):
        assert told == ["a step of this pipeline is running in another thread; wait for it."]


def refuse_at_length(rank, num_ranks):
    pipeline = open_one(rank)
    with pytest.raises(ValueError, match="characters left out") as refused:
        step(pipeline, rank, num_ranks, hint="x" * 5_000_000 if rank == 0 else "1f1b")
    step(pipeline, rank, num_ranks)
    pipeline.close()
    return len(str(refused.value))


def test_a_refusal_of_any_length_leaves_the_pipeline_usable():
    assert max(worker_group(2).values(refuse_at_length)) < 100_000


@pytest.mark.parametrize("moment", ["before the job", "after the job"])
def test_a_worker_closed_in_submit_answers(moment):
    """As by a signal's handler: no lock may be held then."""
    worker, answers = Worker("closed"), queue.SimpleQueue()
    worker.start()
    put, struck = worker._jobs.put, []

    class Jobs:
        get, get_nowait = worker._jobs.get, worker._jobs.get_nowait

        @staticmethod
        def put(job):
            strikes = job is not None and not struck
            struck.append(job)
            if strikes and moment == "before the job":
                assert worker.close(LIMIT_S)
            put(job)
            if strikes and moment == "after the job":
                worker.close(LIMIT_S)

    worker._jobs = Jobs
    worker.submit(object.__new__(RankStep), answers)  # fails where it is run
    (error,) = answers.get(timeout=LIMIT_S)
    assert error is not None and worker.is_idle
    if moment == "before the job":
        assert isinstance(error, rrfp.ClosedError)


DUMPS = """
import faulthandler, gc, sys, threading, time
import torch.distributed
from torch import nn
import rrfp

faulthandler.dump_traceback_later(60, exit=True)
torch.distributed.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=0,
                                     world_size=1)


class Cycle:
    def __init__(self):
        self.me = self

    def __del__(self):
        time.sleep(0.01)


pipeline = rrfp.Pipeline({0: nn.Linear(2, 2)})
stops = []


def dump():
    while not stops:
        pipeline.dump()
        time.sleep(0.001)


thread = threading.Thread(target=dump)
thread.start()
for allocations in range(1, 60):
    gc.disable()
    Cycle()
    gc.set_threshold(gc.get_count()[0] + allocations, 1000, 1000)
    gc.enable()
    pipeline.dump()
    gc.disable()
    gc.collect()
stops.append(True)
thread.join()
pipeline.close()
print("ended")
"""


def test_a_collection_inside_a_dump_blocks_nobody(tmp_path):
    done = subprocess.run([sys.executable, "-c", DUMPS, str(tmp_path / "store")], check=False,
                          capture_output=True, text=True, timeout=2 * LIMIT_S)
    assert done.stdout == "ended\n", done.stderr[-4000:]


def set_up_with_few_descriptors(rank, num_ranks, most):
    """What rank 0 raised with 0 to most - 1 descriptors left; then it works."""
    stage, told = nn.Linear(WIDTH, WIDTH), []
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    for left in range(most):
        gc.collect()
        last, filled = max(map(int, os.listdir("/proc/self/fd"))), [0]
        while filled[-1] <= last:  # no number below the limit is free
            filled.append(os.open("/dev/null", os.O_RDONLY))
        if rank == 0:
            resource.setrlimit(resource.RLIMIT_NOFILE, (filled[-1] + 1 + left, hard))
        try:
            pipeline = rrfp.Pipeline({rank: stage}, set_up_timeout_s=2.0)
            step(pipeline, rank, num_ranks)
            pipeline.close()
        except (OSError, ValueError, RuntimeError) as error:
            told.append(type(error).__name__)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            for descriptor in filled[1:]:
                os.close(descriptor)
        torch.distributed.barrier()
    pipeline = open_one(rank, stage)
    step(pipeline, rank, num_ranks)
    pipeline.close()
    return told


def test_descriptors_that_run_out_at_any_point_of_a_set_up():
    told, _ = worker_group(2).values(set_up_with_few_descriptors, 8)
    assert len(told) >= 4, told
