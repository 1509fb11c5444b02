"""A stage's exception whose own attributes raise: the failure is told all the same.

Would catch: a report that asks the exception for something, and is lost with the answer.
"""

import pytest
import rrfp
import torch


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
    assert "HostileError, whose own text raised RuntimeError" in str(error)
    assert "in fail" in error.original_traceback
    error.__cause__ = None  # pytest would describe it
