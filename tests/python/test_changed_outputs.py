"""An output that its stage writes to again is never sent half changed without a word.

Would catch: a stage that keeps what it returned and changes it for the next microbatch, while the
progress thread still reads it, or while its own backward still needs it.
"""

import pytest
import torch
from parity_group import worker_group
from torch import nn

import rrfp

M, P = 4, 2


class Frozen(nn.Module):
    """As Keeping, without a parameter that takes a gradient, and with a mask beside its output."""

    def __init__(self):
        super().__init__()
        self.last = None

    def forward(self, x):
        if self.last is not None:
            self.last.zero_()
        self.last = torch.ones_like(x)
        return 2 * x, self.last


class Sliced(nn.Module):
    """Returns a part of its product, contiguous or not, and changes only what it has not sent."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 8, dtype=torch.float64)
        self.state = None

    def forward(self, x):
        if self.state is not None:
            with torch.no_grad():
                self.state.add_(1)
        product = self.linear(x)
        self.state = product[:, 4:].detach()
        return product[:, :4]


class Keeping(nn.Module):
    """Adds to its last output, if it is told to, and returns a new one."""

    def __init__(self, changes):
        super().__init__()
        self.linear = nn.Linear(4, 4, dtype=torch.float64)
        self.changes, self.last = changes, None

    def forward(self, x):
        if self.changes and self.last is not None:
            with torch.no_grad():
                self.last.add_(1)
        self.last = self.linear(x)
        return self.last


def run(rank, num_ranks, changes, options):
    torch.manual_seed(rank)
    stage = Keeping(changes and rank == 0)
    inputs = [torch.full((2, 4), float(m), dtype=torch.float64) for m in range(M)]
    rrfp.run_pipeline(
        stage, inputs if rank == 0 else None, inputs if rank == P - 1 else None,
        nn.functional.mse_loss, stall_timeout_s=60.0, **options,
    )


@pytest.mark.parametrize("options", [{}, {"split_backward": True}, {"hint": "gpipe"}])
def test_a_change_before_the_backward_is_told_on_every_rank(options):
    answers = worker_group(P).run(run, True, options)
    assert {answer.error_type for answer in answers} == {"StageError"}, answers
    words = "stage 0 changed in place what it had returned for microbatch"
    assert all(words in answer.error_text for answer in answers), answers


def run_frozen(rank, num_ranks):
    class Masked(nn.Linear):
        def forward(self, x, mask):
            return super().forward(x * mask)

    inputs = [torch.full((2, 4), float(m), dtype=torch.float64) for m in range(M)]
    rrfp.run_pipeline(
        Frozen() if rank == 0 else Masked(4, 4, dtype=torch.float64),
        inputs if rank == 0 else None, inputs if rank == P - 1 else None,
        nn.functional.mse_loss, stall_timeout_s=60.0,
    )


def test_so_is_a_change_of_what_takes_no_gradient():
    answers = worker_group(P).run(run_frozen)
    assert {answer.error_type for answer in answers} == {"StageError"}, answers


def run_sliced(rank, num_ranks):
    torch.manual_seed(rank)
    stage = Sliced() if rank == 0 else nn.Linear(4, 4, dtype=torch.float64)
    inputs = [torch.full((2, 4), float(m), dtype=torch.float64) for m in range(M)]
    rrfp.run_pipeline(
        stage, inputs if rank == 0 else None, inputs if rank == P - 1 else None,
        nn.functional.mse_loss, stall_timeout_s=60.0,
    )


def test_what_was_not_sent_may_change():
    assert worker_group(P).values(run_sliced) == [None, None]


def test_an_output_that_is_only_kept_is_fine():
    assert worker_group(P).values(run, False, {}) == [None, None]


def test_ranks_of_one_process_may_write_to_what_they_receive():
    """There the receiver has the sender's memory, and may begin with an in-place layer."""
    stages = [Keeping(False), nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 4).double())]
    inputs = [torch.full((2, 4), float(m), dtype=torch.float64) for m in range(M)]
    rrfp.run_pipeline(stages, inputs, inputs, nn.functional.mse_loss)


class Static(nn.Module):
    """Without a parameter to train; returns the same memory every time."""

    def __init__(self):
        super().__init__()
        self.kept = [torch.empty(2, 4, dtype=torch.float64)]

    def forward(self, x):
        return self.kept[0].copy_(2 * x)


def test_memory_that_a_later_stages_w_still_reads_is_not_returned_again():
    """The first stage's I has long run when the second stage's W does."""
    inputs = [torch.full((2, 4), float(m), dtype=torch.float64) for m in range(M)]
    first = [f"0{kind}{m}" for m in range(M) for kind in "FIW"]
    second = [f"1{kind}{m}" for m in range(M) for kind in "FI"] + [f"1W{m}" for m in range(M)]
    with pytest.raises(rrfp.StageError, match="stage 0 returned the same memory for microbatch 1"):
        rrfp.run_pipeline([Static(), nn.Linear(4, 4).double()], inputs, inputs,
                          nn.functional.mse_loss, hint=first + second, slack=0,
                          split_backward=True, max_in_flight=M)
