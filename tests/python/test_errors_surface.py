"""Errors as a user sees them: classes, attributes, words, and that nothing is left behind."""

import gc
import subprocess
import sys
import threading
import time
import weakref

import pytest
import rrfp
import torch
from rrfp import _C
from rrfp.errors import error_from_status, stage_failure_text
from rrfp.settings import read_settings

LOSS = torch.nn.functional.mse_loss


class Failing(torch.nn.Module):
    """Raises in its third forward, or in the backward of that."""

    def __init__(self, where):
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
        self.where = where
        self.num_calls = 0

    def forward(self, x):
        self.num_calls += 1
        if self.num_calls == 3 and self.where == "F":
            raise KeyError("broken on purpose")
        y = self.linear(x)
        if self.num_calls == 3:
            y.register_hook(self.fail_in_backward)
        return y

    def fail_in_backward(self, gradient):
        raise KeyError("broken on purpose")


def batch(num_microbatches=6):
    return [torch.randn(2, 4) for _ in range(num_microbatches)]


def run_threads():
    return [t.name for t in threading.enumerate() if t.name.startswith("rrfp-rank")]


@pytest.mark.parametrize("where", ["F", "B"])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_stage_error_says_where(stage, where):
    stages = [torch.nn.Linear(4, 4) for _ in range(3)]
    stages[stage] = Failing(where)
    with pytest.raises(rrfp.StageError, match="broken on purpose") as caught:
        rrfp.run_pipeline(stages, batch(), batch(), LOSS)
    error = caught.value
    assert (error.rank, error.stage, error.task) == (stage, stage, f"{stage}{where}2")
    assert isinstance(error.__cause__, KeyError)
    assert "fail_in_backward" in error.original_traceback or where == "F"
    assert "KeyError" in error.original_traceback
    assert len(rrfp.run_pipeline(stages, batch(), batch(), LOSS).losses) == 6, "not built anew"


class Returning(torch.nn.Module):
    """Returns what a function makes of its linear output; called with anything."""

    def __init__(self, make):
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
        self.make = make

    def forward(self, x):
        return self.make(self.linear(x))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda y: "hello", "from stage 0: a str."),
        (lambda y: None, "from stage 0: None."),
        (lambda y: {"x": y}, "from stage 0: a dict of ('x': a tensor of shape (2, 4), float32)."),
        (lambda y: (y, 1), "from stage 0: a tuple of (a tensor of shape (2, 4), float32; an int)."),
        (lambda y: [y] * 6, "2 more)."),
        (lambda y: y[:, :3], "from stage 0: a tensor of shape (2, 3), float32."),
    ],
)
def test_stage_error_says_who_sent_the_input(make, words):
    with pytest.raises(rrfp.StageError, match="stage 1, forward of microbatch 0") as caught:
        rrfp.run_pipeline([Returning(make), torch.nn.Linear(4, 4)], batch(), batch(), LOSS)
    line = str(caught.value).splitlines()[1]
    assert line.startswith("Its input came ") and line.endswith(words)


def test_stage_error_says_what_was_given_to_the_first_stage():
    inputs = [torch.ones(2, 4, dtype=torch.int64)] * 2
    with pytest.raises(rrfp.StageError) as caught:
        rrfp.run_pipeline([torch.nn.Linear(4, 4)], inputs, inputs, LOSS)
    assert str(caught.value).splitlines()[1] == (
        "Its input was given as microbatch 0: a tensor of shape (2, 4), int64.")


def test_stage_error_says_what_the_loss_function_was_called_with():
    stages = [torch.nn.Linear(4, 4), Returning(lambda y: None)]
    with pytest.raises(rrfp.StageError, match="'NoneType' object") as caught:
        rrfp.run_pipeline(stages, batch(), batch(), LOSS)
    assert str(caught.value).splitlines()[1] == (
        "loss_fn was called with what stage 1 returned, None, and a tensor of shape (2, 4), "
        "float32 as target.")


@pytest.mark.parametrize("where", ["F", "B"])
def test_tracebacks_begin_where_rrfp_ends(where, caplog):
    with caplog.at_level("DEBUG", logger="rrfp"), pytest.raises(rrfp.StageError) as caught:
        rrfp.run_pipeline([Failing(where), torch.nn.Linear(4, 4)], batch(), batch(), LOSS)
    assert "worker.py" not in caught.value.original_traceback
    assert "test_errors_surface.py" in caught.value.original_traceback
    assert caught.value.__cause__.__traceback__.tb_frame.f_code.co_filename.find("worker.py") < 0
    assert "in _run_task" in caplog.text, "the whole traceback is nowhere"


def test_pipeline_is_closed_after_an_error():
    with rrfp.Pipeline([Failing("F"), torch.nn.Linear(4, 4)]) as pipeline:
        with pytest.raises(rrfp.StageError):
            pipeline.step(batch(), batch(), LOSS)
        with pytest.raises(rrfp.ClosedError, match="closed"):
            pipeline.step(batch(), batch(), LOSS)


def test_refusal_leaves_the_pipeline_usable():
    with rrfp.Pipeline([torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)]) as pipeline:
        with pytest.raises(ValueError, match="slack is -1"):
            pipeline.step(batch(), batch(), LOSS, slack=-1)
        assert len(pipeline.step(batch(), batch(), LOSS).losses) == 6


def test_static_output_buffer_is_refused():
    again = threading.Event()  # the first microbatch stays in flight until the second forward

    class Static(torch.nn.Linear):
        kept = [torch.zeros(2, 4)]
        calls = 0

        def forward(self, x):
            self.calls += 1
            if self.calls > 1:
                again.set()
            return self.kept[0].copy_(super().forward(x).detach()).view(2, 4)

    class Slow(torch.nn.Linear):
        def forward(self, x):
            again.wait(10)
            time.sleep(0.2)  # until the second forward was looked at, not just begun
            return super().forward(x)

    for forward_only in (False, True):
        again.clear()
        stages = [Static(4, 4), Slow(4, 4)]
        with pytest.raises(rrfp.StageError, match=r"same memory.*\.clone\(\)"):
            rrfp.run_pipeline(
                stages, batch(), batch(), LOSS, hint="f-priority", forward_only=forward_only
            )


def test_gradient_in_flight_is_not_changed_by_later_ones():
    """A parameter that takes the memory of an incoming gradient over must not spoil it."""

    class Shift(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.shift = torch.nn.Parameter(torch.zeros(8))

        def forward(self, x):
            return x.view(8) + self.shift

    first, inputs = torch.nn.Linear(4, 4), batch()
    result = rrfp.run_pipeline(
        [first, Shift()], inputs, inputs, lambda out, _: out.square().sum(), loss_reduction="sum"
    )
    reference = torch.nn.Linear(4, 4)
    reference.load_state_dict(first.state_dict())
    for x in inputs:
        reference(x).square().sum().backward()
    assert len(result.losses) == 6
    torch.testing.assert_close(first.weight.grad, reference.weight.grad)


def test_threads_go_with_the_model():
    gc.collect()
    before = len(run_threads())
    stages = [torch.nn.Linear(4, 4) for _ in range(3)]
    rrfp.run_pipeline(stages, batch(), batch(), LOSS)
    assert len(run_threads()) == before + 3
    gone = weakref.ref(stages[0])
    del stages
    gc.collect()
    assert gone() is None
    assert len(run_threads()) == before


def test_every_status_has_its_class():
    expected = {
        "PEER_LOST": rrfp.PeerLostError,
        "STALLED": rrfp.StallError,
        "PROTOCOL": rrfp.ProtocolError,
        "INTERRUPTED": rrfp.InterruptedStepError,
        "CLOSED": rrfp.ClosedError,
        "TIMED_OUT": rrfp.RankTimeoutError,
        "DEVICE_FAILED": rrfp.DeviceError,
        "STAGE_FAILED": rrfp.StageError,
    }
    assert set(expected) == set(_C.StatusCode.__members__)
    for name, kind in expected.items():
        error = error_from_status(_C.StatusCode.__members__[name], 2, "words")
        assert type(error) is kind
        assert error.rank == 2
        assert "words" in str(error)


def test_stage_failure_text_survives_long_tracebacks():
    text = stage_failure_text("1F3", ValueError("two\nlines"), "t" * 1_000_000)
    assert len(text) < 100_000
    error = error_from_status(_C.StatusCode.STAGE_FAILED, 1, text)
    assert (error.stage, error.task) == (1, "1F3")
    assert "ValueError: two lines" in str(error)


def test_an_aborted_runtime_raises_status_error():
    runtime = _C.make_local_runtimes(1, 1, 0, False)[0]
    runtime.abort(_C.StatusCode.CLOSED, 0, "over")
    with pytest.raises(_C.StatusError, match="over") as caught:
        runtime.wait_sends(1000)
    error = caught.value
    assert (error.code, error.origin_rank, error.message) == (_C.StatusCode.CLOSED, 0, "over")
    assert runtime.status == (_C.StatusCode.CLOSED, 0, "over")


def test_settings():
    assert read_settings({"RRFP_SPIN_US": "20"}).spin_us == 20
    assert read_settings({}).peer_timeout_s == 60.0
    assert read_settings({}).spin_us is None
    for name, text in (("RRFP_HEARTBEAT_MS", "0"), ("RRFP_PEER_TIMEOUT_S", "soon")):
        with pytest.raises(ValueError, match=f"{name} is '{text}'"):
            read_settings({name: text})


EXIT_AFTER = {
    "an error": "class S(torch.nn.Linear):\n"
    "    def forward(self, x): raise KeyError\n"
    "try: rrfp.run_pipeline([S(4, 4), torch.nn.Linear(4, 4)], x, x, loss)\n"
    "except rrfp.StageError: print('as expected')\n",
    "a step": "rrfp.run_pipeline(stages, x, x, loss); print('as expected')\n",
    "Ctrl-C": "import os, signal, threading\n"
    "class S(torch.nn.Linear):\n"
    "    def forward(self, x):\n"
    "        os.kill(os.getpid(), signal.SIGINT)\n"
    "        return super().forward(x)\n"
    "try: rrfp.run_pipeline([S(4, 4), torch.nn.Linear(4, 4)], x, x, loss)\n"
    "except KeyboardInterrupt: print('as expected')\n",
    "a fork": "import os\n"
    "rrfp.run_pipeline(stages, x, x, loss)\n"
    "child = os.fork()\n"
    "if child == 0:\n"
    "    try: rrfp.run_pipeline(stages, x, x, loss)\n"
    "    except rrfp.RrfpError: raise SystemExit(7)\n"
    "    raise SystemExit(8)\n"
    "assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7\n"
    "rrfp.run_pipeline(stages, x, x, loss); print('as expected')\n",
}


@pytest.mark.parametrize("what", EXIT_AFTER)
def test_interpreter_exits_after(what):
    script = (
        "import torch, rrfp\n"
        "loss = torch.nn.functional.mse_loss\n"
        "stages = [torch.nn.Linear(4, 4) for _ in range(3)]\n"
        "x = [torch.randn(2, 4) for _ in range(4)]\n" + EXIT_AFTER[what]
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "as expected" in done.stdout
