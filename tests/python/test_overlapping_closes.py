"""Closes beside a step that goes on for long, and inside another close.

Would catch: a session that is kept for good because its close did not see the step end, or that
counts as open after it has ended, so that every fork is refused; a close that waits for each rank
anew.
"""

import threading

import pytest
import torch
from parity_group import worker_group
from torch import nn

import rrfp
from rrfp import local_session, session
from rrfp.settings import Settings
from rrfp.worker import Worker

LIMIT_S, CLOSE_S = 60, 0.1


class Held(nn.Linear):
    """Its forwards wait for the test."""

    def __init__(self):
        super().__init__(4, 4)
        self.entered, self.may_go = threading.Event(), threading.Event()

    def forward(self, x):
        self.entered.set()
        self.may_go.wait(LIMIT_S)
        return super().forward(x)


def test_the_thread_of_a_step_that_outlasts_its_close_ends_the_session(monkeypatch, caplog):
    close, waits_s = Worker.close, []

    def waits(worker, timeout_s):
        waits_s.append(timeout_s)
        return close(worker, timeout_s)

    monkeypatch.setattr(local_session, "SETTINGS", Settings(close_timeout_s=CLOSE_S))
    monkeypatch.setattr(Worker, "close", waits)
    before = list(session._abandoned_sessions), set(threading.enumerate())
    stage, batch, ended = Held(), [torch.ones(2, 4)] * 2, []
    pipeline = rrfp.Pipeline([stage, nn.Linear(4, 4), nn.Linear(4, 4)])

    def step():
        with pytest.raises(rrfp.ClosedError):
            pipeline.step(batch, batch, nn.functional.mse_loss)
        ended.append(not pipeline._session._is_half_closed)

    stepping = threading.Thread(target=step)
    stepping.start()
    assert stage.entered.wait(LIMIT_S)
    pipeline.close()
    assert sum(waits_s) <= CLOSE_S and stepping.is_alive()
    assert "a stage is still running" in caplog.text
    monkeypatch.setattr(local_session, "SETTINGS", Settings(close_timeout_s=LIMIT_S))
    stage.may_go.set()
    stepping.join(LIMIT_S)
    assert ended == [True]
    assert (list(session._abandoned_sessions), set(threading.enumerate())) == before


class Interrupted:
    """A core at whose end a signal's handler closes the pipeline once more."""

    def __init__(self, runtime, close):
        self._runtime, self._close = runtime, close

    def end(self, timeout_ms):
        self._runtime.end(timeout_ms)
        self._close()

    def __getattr__(self, name):
        return getattr(self._runtime, name)


def close_twice(rank, num_ranks):
    pipeline = rrfp.Pipeline({rank: nn.Linear(4, 4)}, set_up_timeout_s=LIMIT_S)
    closing = pipeline._session
    closing._runtime = Interrupted(closing._runtime, pipeline.close)
    pipeline.close()
    return closing in session.open_sessions()


def test_a_pipeline_that_is_closed_inside_its_close_is_not_open():
    assert worker_group(2).values(close_twice) == [False, False]
