"""Exceptions whose own attributes raise, in a stage or before a step: the failure is told all the
same, on every rank.

Would catch: a report that asks the exception for something, and is lost with the answer; ranks that
wait for one that could not say why it does not come.
"""

import pytest
import torch
from parity_group import worker_group

import rrfp
from rrfp.value_text import class_name


class HostileError(Exception):
    """Whatever is asked of it raises."""

    def fail(self, *arguments):
        raise RuntimeError("not even that")

    __str__ = __repr__ = __bool__ = with_traceback = fail
    __notes__ = property(fail)


class Hostile(torch.nn.Module):
    def __init__(self, where):
        super().__init__()
        self.linear, self.where = torch.nn.Linear(4, 4), where

    def forward(self, x):
        if self.where == "F":
            self.fail()
        y = self.linear(x)
        y.register_hook(self.fail)
        return y

    def fail(self, *gradient):
        raise HostileError


@pytest.mark.parametrize("where", ["F", "B"])
@pytest.mark.parametrize("level", ["WARNING", "DEBUG"])
def test_it_is_a_stage_error_all_the_same(where, level, caplog):
    batch = torch.randn(4, 4).chunk(2)
    with caplog.at_level(level, logger="rrfp"), pytest.raises(rrfp.StageError) as caught:
        rrfp.run_pipeline([torch.nn.Linear(4, 4), Hostile(where)], batch, batch,
                          torch.nn.functional.mse_loss)
    error = caught.value
    assert error.task == f"1{where}0" and isinstance(error.__cause__, HostileError)
    assert "HostileError: its description raised RuntimeError" in str(error)
    assert "in fail" in error.original_traceback
    error.__cause__ = None  # pytest would describe it


class Unnamed(type):
    __name__ = property(lambda cls: HostileError.fail(cls))


class Watchdog(BaseException):
    __str__ = __repr__ = HostileError.fail


class Nameless(Exception, metaclass=Unnamed):
    pass


class Interrupting(Exception):
    def __str__(self):
        raise KeyboardInterrupt


ERRORS = {"Watchdog": Watchdog, "HostileError": HostileError, "Nameless": Nameless,
          "Interrupting": Interrupting}


def run_raising(rank, num_ranks, name, where):
    """The name of the error with which a step ends before which rank 1 raises another."""
    stage, batch, options = torch.nn.Linear(4, 4), [torch.ones(2, 4)] * 2, {}
    pipeline = rrfp.Pipeline({rank: stage}, set_up_timeout_s=60.0)
    targets = batch if rank == num_ranks - 1 else None

    def fail(*_, **__):
        raise ERRORS[name]

    if rank == 1 and where == "targets":
        targets, options = map(fail, batch), {"num_microbatches": 2}
    elif rank == 1:
        stage.parameters = fail
    try:
        pipeline.step(batch if rank == 0 else None, targets, torch.nn.functional.mse_loss,
                      stall_timeout_s=60.0, **options)
    except BaseException as error:
        return class_name(error)
    finally:
        pipeline.close()
    return "none"


@pytest.mark.parametrize("where", ["targets", "parameters"])
@pytest.mark.parametrize("name", ERRORS)
def test_the_other_ranks_hear_of_it(name, where):
    first, second = worker_group(2).values(run_raising, name, where)
    is_refusal = where == "targets" and name != "Watchdog"
    assert (first, second) == (("ValueError", "ValueError") if is_refusal
                               else ("ClosedError", name))
