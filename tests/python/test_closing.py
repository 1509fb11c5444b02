"""Closing a pipeline while a step begins, and Ctrl-C wherever it comes: nothing waits for ever.

Would catch: a step handed to a worker that has just ended, which nobody answers; an answer that is
lost with an interrupt, and waited for; a session half closed, whose threads outlive it; a pipeline
kept for good because its own thread was the last to know a stage.
"""

import gc
import os
import random
import subprocess
import sys
import threading
import time

import pytest
import torch
from torch import nn

import rrfp
from rrfp import session
from rrfp.local_session import LocalSession
from rrfp.turn_trial import TurnTrial
from rrfp.worker import RankStep, Worker

RANKS, M = 2, 4
LIMIT_S = 60


class Napping(nn.Linear):
    """A stage whose forwards take up to ``nap_s``."""

    def __init__(self, nap_s):
        super().__init__(4, 4)
        self.nap_s = nap_s

    def forward(self, x):
        time.sleep(self.nap_s * random.random())
        return super().forward(x)


def batch():
    return [torch.ones(2, 4) for _ in range(M)]


@pytest.mark.parametrize("nap_s", [0.0, 0.003])
def test_close_from_another_thread_ends_the_steps(nap_s, seed):
    rng = random.Random(seed)
    for _ in range(25):
        pipeline = rrfp.Pipeline([Napping(nap_s) for _ in range(RANKS)])
        closing = threading.Timer(rng.random() * 0.03, pipeline.close)
        closing.start()
        ended = []

        def run(pipeline=pipeline, ended=ended):
            try:
                while True:
                    pipeline.step(batch(), batch(), nn.functional.mse_loss)
            except rrfp.RrfpError as error:
                ended.append(error)

        stepping = threading.Thread(target=run, daemon=True)
        stepping.start()
        stepping.join(LIMIT_S)
        closing.join(LIMIT_S)
        assert ended and not closing.is_alive()


def test_a_closed_worker_answers():
    worker = Worker("closed")
    assert worker.close(LIMIT_S)
    answers = []

    class Finished:
        put = staticmethod(answers.append)

    worker.submit(object.__new__(RankStep), Finished)
    assert worker.is_idle and isinstance(answers[0][0], rrfp.ClosedError)


INTERRUPTED = """
import faulthandler, os, random, signal, sys, threading, time
import torch
from torch import nn
import rrfp

faulthandler.dump_traceback_later(100, exit=True)
rng = random.Random(int(sys.argv[1]))
stages = [nn.Linear(4, 4) for _ in range(4)]
batch = [torch.ones(2, 4) for _ in range(4)]


def interrupt(begun, delay_s):
    begun.wait()
    time.sleep(delay_s)
    os.kill(os.getpid(), signal.SIGINT)


num_interrupts = 0
for _ in range(25):
    begun = threading.Event()
    thread = threading.Thread(target=interrupt, args=(begun, 0.003 + 0.02 * rng.random()))
    thread.start()
    try:
        begun.set()  # here: a crowded core may take longer than the delay to leave start()
        while True:
            rrfp.run_pipeline(stages, batch, batch, nn.functional.mse_loss, stall_timeout_s=20)
    except KeyboardInterrupt:
        num_interrupts += 1
    thread.join()
for stage in stages:
    stage.zero_grad()
rrfp.run_pipeline(stages, batch, batch, nn.functional.mse_loss)
expected = [p.grad.clone() for stage in stages for p in stage.parameters()]
for stage in stages:
    stage.zero_grad()
hidden = batch[0]
for stage in stages:
    hidden = stage(hidden)
nn.functional.mse_loss(hidden, batch[0]).backward()
for found, reference in zip(expected, (p.grad for s in stages for p in s.parameters())):
    torch.testing.assert_close(found, reference)
print("interrupts", num_interrupts)
"""


def test_ctrl_c_at_any_point_of_a_step(seed):
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED, str(seed)], capture_output=True, text=True,
        timeout=2 * LIMIT_S, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr[-6000:]
    assert done.stdout == "interrupts 25\n", done.stdout


def test_a_close_that_is_interrupted_is_finished_by_the_next(monkeypatch):
    pipeline = rrfp.Pipeline([Napping(0.0) for _ in range(RANKS)])
    pipeline.step(batch(), batch(), nn.functional.mse_loss)
    before = {thread.name for thread in threading.enumerate()}
    close, calls = Worker.close, []

    def interrupted(worker, timeout_s):
        calls.append(worker)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return close(worker, timeout_s)

    monkeypatch.setattr(Worker, "close", interrupted)
    with pytest.raises(KeyboardInterrupt):
        pipeline.close()
    with pytest.raises(rrfp.ClosedError):
        pipeline.step(batch(), batch(), nn.functional.mse_loss)
    pipeline.close()
    left = {thread.name for thread in threading.enumerate() if thread.name.startswith("rrfp-rank")}
    assert len(calls) == 2 + 2 * RANKS and before >= left
    assert not any(worker.thread.is_alive() for worker in calls)


def test_a_pipeline_goes_with_its_stages_though_a_worker_is_slow_to_let_go(caplog):
    """Its thread would close it, and cannot wait for itself."""

    def trace(frame, event, arg):
        def each_line(frame, event, arg):
            time.sleep(0.003)
            return each_line

        return each_line if frame.f_code.co_name == "_serve" else None

    before = list(session._abandoned_sessions)
    threading.settrace(trace)  # of threads that start from now on
    try:
        for _ in range(3):
            stages = [Napping(0.0) for _ in range(RANKS)]
            rrfp.run_pipeline(stages, batch(), batch(), nn.functional.mse_loss)
            del stages
    finally:
        threading.settrace(None)
    assert session._abandoned_sessions == before and not caplog.records


class Closing(nn.Linear):
    """Closes its own pipeline in the ``count``-th forward."""

    def __init__(self, count):
        super().__init__(4, 4)
        self.count, self.pipeline = count, None

    def forward(self, x):
        self.count -= 1
        if self.count == 0:
            self.pipeline.close()
        return super().forward(x)


@pytest.mark.parametrize("count", [1, M])
def test_a_stage_that_closes_its_pipeline_leaves_no_thread(count, caplog):
    before = list(session._abandoned_sessions), set(threading.enumerate())
    stages = [Napping(0.001), Closing(count)]
    with rrfp.Pipeline(stages) as pipeline:
        stages[1].pipeline = pipeline
        with pytest.raises(rrfp.ClosedError):
            pipeline.step(batch(), batch(), nn.functional.mse_loss)
        assert (list(session._abandoned_sessions), set(threading.enumerate())) == before
    assert not caplog.records


def test_a_set_up_that_is_interrupted_leaves_no_thread(monkeypatch):
    begin, begun = Worker.__init__, []

    def interrupted(worker, name):
        if begun:
            raise KeyboardInterrupt
        begin(worker, name)
        begun.append(worker)

    monkeypatch.setattr(Worker, "__init__", interrupted)
    with pytest.raises(KeyboardInterrupt):
        rrfp.Pipeline([Napping(0.0) for _ in range(RANKS)])
    assert not begun[0].thread.is_alive()


def test_a_worker_that_is_interrupted_while_it_starts_ends(monkeypatch):
    started, start = [], threading.Thread.start

    def interrupted(thread):
        start(thread)
        started.append(thread)
        raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    workers = [Worker("interrupted"), Worker("not started")]
    with pytest.raises(KeyboardInterrupt):
        workers[0].start()
    monkeypatch.undo()
    assert all(worker.close(30) for worker in workers)
    assert not started[0].is_alive()


def test_threads_end_with_a_session_that_nobody_has():
    """As after a Ctrl-C that comes when it is made and not yet handed over."""
    pipeline = rrfp.Pipeline([nn.Linear(4, 4), nn.Linear(4, 4)])
    threads = [worker.thread for worker in pipeline._session._workers]
    del pipeline
    gc.collect()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()


def interrupted(*_):
    raise KeyboardInterrupt


@pytest.mark.parametrize("place", [(TurnTrial, "choose"), (LocalSession, "_run_side_by_side")])
def test_ctrl_c_just_before_the_tasks_of_a_step(place, monkeypatch):
    """The step may have been counted then, though no rank has run it."""
    stages = [nn.Linear(4, 4) for _ in range(RANKS)]

    def run():
        return rrfp.run_pipeline(stages, batch(), batch(), nn.functional.mse_loss).losses

    run()
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(*place, interrupted)
        run()
    assert len(run()) == M
