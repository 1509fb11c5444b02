"""What rrfp refuses of a stage or loss function is told in words, without frames of rrfp.

Would catch: a traceback through rrfp for a user's mistake, and one left out for a bug of rrfp.
"""

from types import SimpleNamespace

import pytest
import rrfp
import torch

LOSS = torch.nn.functional.mse_loss


class Holding(torch.nn.Linear):
    def forward(self, x):
        return SimpleNamespace(held=super().forward(x))


def refusal(stages, loss_fn):
    batch = [torch.randn(2, 4) for _ in range(2)]
    with pytest.raises(rrfp.StageError) as caught:
        rrfp.run_pipeline(stages, batch, batch, loss_fn)
    return caught.value


@pytest.mark.parametrize(
    ("stages", "loss_fn", "words", "raised_in"),
    [
        ([torch.nn.Linear(4, 4)], lambda out, target: 1.0,
         "TypeError: loss_fn returned a float", "_check_loss"),
        ([torch.nn.Linear(4, 4)], lambda out, target: out,
         "ValueError: loss_fn returned a loss of shape (2, 4)", "_check_loss"),
        ([torch.nn.Linear(4, 4)], lambda out, target: out.sum().detach(),
         "ValueError: the loss of microbatch 0 does not require grad", "_check_loss"),
        ([Holding(4, 4), torch.nn.Linear(4, 4)], LOSS,
         "ValueError: stage 0 returned a SimpleNamespace", "refuse_hidden_tensors"),
    ],
)
def test_a_refusal_has_no_frames(stages, loss_fn, words, raised_in, caplog):
    with caplog.at_level("DEBUG", logger="rrfp"):
        error = refusal(stages, loss_fn)
    assert words in str(error).splitlines()[0] and len(str(error).splitlines()) == 2
    assert error.original_traceback.startswith(words) and ".py" not in error.original_traceback
    assert error.__cause__.__traceback__ is None
    assert f"in {raised_in}" in caplog.text, "the whole traceback is nowhere"


def test_a_bug_of_rrfp_keeps_its_frames(monkeypatch):
    monkeypatch.setattr("rrfp.stage.detach_tree", None)  # called with the metrics of every loss
    error = refusal([torch.nn.Linear(4, 4)], LOSS)
    assert "TypeError: 'NoneType' object is not callable" in str(error)
    assert "in _keep_loss" in str(error) and "in _keep_loss" in error.original_traceback
