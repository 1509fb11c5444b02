"""An output that its stage writes to again is never read half changed without a word.

Would catch: a stage that keeps what it returned and changes it for the next microbatch, while the
progress thread or the next stage still reads it, or while its own backward still needs it; and a
watch that takes what the next stage may do for that.
"""

import time
import weakref

import pytest
import torch
from parity_group import worker_group
from torch import nn

import rrfp
from rrfp.boundary import Parcel, encode, flatten
from rrfp.loan import Loan

M, P = 4, 2


class Masked(nn.Linear):
    def forward(self, x, mask):
        return super().forward(x * mask)


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


class Slow(nn.Linear):
    """Reads its input late: the stage before it goes on meanwhile."""

    def __init__(self):
        super().__init__(4, 4, dtype=torch.float64)

    def forward(self, x):
        time.sleep(0.01)
        return super().forward(x)


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


@pytest.mark.parametrize("leaves", [1, 2])
def test_memory_on_its_way_is_known_as_taken(leaves):
    """Its stage may not return it again, though nobody but the message holds on to it."""
    outputs = [torch.zeros(4) for _ in range(leaves)]
    tree, flat = flatten(outputs[0] if leaves == 1 else outputs)
    loan = Loan(0, 0, flat, [])
    *_, owner = encode(Parcel(tree, loan.leaves, (), loan))
    alive = [weakref.ref(output) for output in outputs]
    del outputs, flat, loan
    assert all(output() is not None for output in alive)
    del owner
    assert all(output() is None for output in alive)


def test_an_output_that_is_only_kept_is_fine():
    assert worker_group(P).values(run, False, {}) == [None, None]


def run_in_one_process(stages, **options):
    inputs = [torch.full((2, 4), float(m), dtype=torch.float64) for m in range(M)]
    rrfp.run_pipeline(stages, inputs, inputs, nn.functional.mse_loss, **options)


@pytest.mark.parametrize("options", [
    {}, {"split_backward": True}, {"hint": "gpipe"}, {"forward_only": True},
    {"num_ranks": 1, "placement": [0, 0]},
])
@pytest.mark.parametrize("with_gradient", [True, False])
def test_ranks_of_one_process_are_told_too(with_gradient, options):
    """The change comes before the next stage reads, or while it has nothing to do with it."""
    stages = [Keeping(True), Slow()] if with_gradient else [Frozen(), Masked(4, 4).double()]
    with pytest.raises(rrfp.StageError, match="stage 0 changed in place what it had returned"):
        run_in_one_process(stages, **options)


@pytest.mark.parametrize("options", [{}, {"split_backward": True}, {"forward_only": True}])
def test_they_may_write_to_what_they_receive(options):
    """There the receiver has the sender's memory, and may begin with an in-place layer."""
    in_place = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 4).double())
    run_in_one_process([Keeping(False), in_place], **options)


def test_also_to_what_was_only_passed_on():
    in_place = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 4).double())
    run_in_one_process([Keeping(False), nn.Identity(), nn.Identity(), in_place])


@pytest.mark.parametrize("between", [[], [nn.Identity()]])
def test_but_not_to_what_the_sender_still_needs(between):
    """A tanh's backward takes its output."""
    in_place = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 4).double())
    first = nn.Sequential(nn.Linear(4, 4).double(), nn.Tanh())
    with pytest.raises(rrfp.StageError, match="modified by an inplace operation"):
        run_in_one_process([first, *between, in_place])


class Late(nn.Linear):
    """Changes what it received for one microbatch when it runs the next."""

    def __init__(self):
        super().__init__(4, 4, dtype=torch.float64)
        self.received = None

    def forward(self, x):
        if self.received is not None:
            with torch.no_grad():
                self.received.add_(1)
        self.received = x
        return super().forward(1 * x)


def test_nor_after_the_forward():
    with pytest.raises(rrfp.StageError, match="by the stage that received it, after its forward"):
        run_in_one_process([Keeping(False), Late()], hint="gpipe", max_in_flight=M)
