"""Pipeline.dump() and RRFP_DUMP_SIGNAL: who runs what, who waits for whom, what was chosen last."""

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading

import pytest
import torch

import rrfp
from rrfp.settings import read_settings


class Held(torch.nn.Linear):
    """A stage whose forward of the second microbatch waits for the test."""

    def __init__(self):
        super().__init__(4, 4)
        self.calls, self.is_inside, self.may_go = 0, threading.Event(), threading.Event()

    def forward(self, x):
        self.calls += 1
        if self.calls == 2:
            self.is_inside.set()
            assert self.may_go.wait(60)
        return super().forward(x)


def test_dump_during_a_step():
    held, batch = Held(), [torch.ones(2, 4)] * 4
    with rrfp.Pipeline([held, torch.nn.Linear(4, 4)]) as pipeline:
        step = threading.Thread(
            target=pipeline.step, args=(batch, batch, torch.nn.functional.mse_loss),
            kwargs={"hint": "1f1b", "slack": 0},
        )
        step.start()
        assert held.is_inside.wait(60)
        ranks = json.loads(pipeline.dump(as_json=True))["ranks"]
        text = pipeline.dump()
        held.may_go.set()
        step.join()
        done = json.loads(pipeline.dump(as_json=True))["ranks"]
    assert [entry["rank"] for entry in ranks] == [0, 1]
    assert "is inside 0F1, for" in ranks[0]["state"]
    assert [d["task"] for d in ranks[0]["decisions"]] == ["0F0", "0F1"]
    assert ranks[0]["activity"] == "running" and ranks[0]["task"] == "0F1"
    assert re.search(r"^Rank 0: step 0: 0F0 \d+\.\d\d, 0F1 \d+\.\d\d$", text, re.MULTILINE), text
    assert [d["task"] for d in done[1]["decisions"]] == [
        f"1{kind}{m}" for m in range(4) for kind in "FB"
    ]
    with pytest.raises(rrfp.ClosedError):
        pipeline.dump()


def test_only_the_last_decisions_are_kept():
    batch = [torch.ones(2, 4)] * 40
    with rrfp.Pipeline([torch.nn.Linear(4, 4)]) as pipeline:
        pipeline.step(batch, batch, torch.nn.functional.mse_loss)
        (entry,) = json.loads(pipeline.dump(as_json=True))["ranks"]
    assert len(entry["decisions"]) == 32
    assert entry["decisions"][-1]["task"] == "0B39"


def test_what_was_passed_over_and_why():
    """Stage 0 ends microbatch 0 only when stage 1 has begun another, which says what it passed."""
    has_begun = threading.Event()

    class Last(torch.nn.Linear):
        def forward(self, x):
            if x[0, 0] == 0:
                assert has_begun.wait(60)
            return super().forward(x)

    class Early(torch.nn.Linear):
        def forward(self, x):
            has_begun.set()
            return super().forward(x)

    batch = [torch.full((2, 4), float(m)) for m in range(3)]
    order = ["0F1", "0F2", "0F0", "0B1", "0B2", "0B0",
             "1F0", "1B0", "1F1", "1B1", "1F2", "1B2"]
    with rrfp.Pipeline([Last(4, 4), Early(4, 4)]) as pipeline:
        pipeline.step(batch, batch, torch.nn.functional.mse_loss, hint=order, max_in_flight=3)
        text = pipeline.dump()
        ranks = json.loads(pipeline.dump(as_json=True))["ranks"]
    first = ranks[1]["decisions"][0]
    assert (first["task"], first["passed"], first["because"]) == ("1F1", "1F0", "lacks stage 0")
    assert first["num_passed"] == 2  # 1F0 and 1B0
    assert " before 1F0 (lacks stage 0) and 1 more" in text


SIGNALLED = textwrap.dedent("""
    import os, signal, torch, rrfp

    class Asks(torch.nn.Linear):
        def forward(self, x):
            os.kill(os.getpid(), signal.SIGUSR1)
            return super().forward(x)

    batch = [torch.ones(2, 4)] * 2
    rrfp.run_pipeline([torch.nn.Linear(4, 4), Asks(4, 4)], batch, batch,
                      torch.nn.functional.mse_loss)
    print("done")
""")


def test_signal():
    run = subprocess.run([sys.executable, "-c", SIGNALLED], capture_output=True, text=True,
                         timeout=300, env={**os.environ, "RRFP_DUMP_SIGNAL": "SIGUSR1"})
    assert run.returncode == 0 and "done" in run.stdout, run.stderr
    assert re.search(r"^Rank 1: step 0: 1F0 \d", run.stderr, re.MULTILINE), run.stderr
    assert re.search(r"^Rank 1 (is|waits).* for \d", run.stderr, re.MULTILINE)


def test_setting():
    assert read_settings({"RRFP_DUMP_SIGNAL": "SIGUSR2"}).dump_signal == signal.SIGUSR2
    for text in ("SIGKILL", "12", "SIG_IGN", "NOTHING"):
        with pytest.raises(ValueError, match="RRFP_DUMP_SIGNAL"):
            read_settings({"RRFP_DUMP_SIGNAL": text})
