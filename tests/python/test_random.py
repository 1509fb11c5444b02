"""Keyed random numbers: in worker threads every operation draws what it would draw alone.

Would catch: an operation that reaches torch's shared generator past the thread's own; a user's
generator that is ignored; a state that is not restored; a counter that a checkpoint loses.
"""

import threading

import pytest
import torch
from parity_group import worker_group
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import rrfp
from rrfp.task_rng import StepRandom, _restored

ONES = torch.ones(4, 8)
DRAWS = {
    "dropout": lambda: F.dropout(ONES, 0.5),
    "dropout with gradient": lambda: F.dropout(ONES.clone().requires_grad_(), 0.5).detach(),
    "dropout in place": lambda: F.dropout(ONES.clone(), 0.5, inplace=True),
    "native dropout": lambda: torch.native_dropout(ONES, 0.5, True)[0],
    "feature dropout": lambda: F.dropout2d(torch.ones(3, 4, 2, 2)),
    "alpha dropout": lambda: F.alpha_dropout(ONES, 0.3, True),
    "attention": lambda: F.scaled_dot_product_attention(
        *[torch.ones(1, 2, 4, 8)] * 3, dropout_p=0.5
    ),
    "lstm": lambda: nn.LSTM(3, 3, 2, dropout=0.5)(torch.ones(4, 1, 3))[0].detach(),
    "rand": lambda: torch.rand(5),
    "randn": lambda: torch.randn(5),
    "randint": lambda: torch.randint(0, 99, (5,)),
    "randperm": lambda: torch.randperm(9),
    "rand_like": lambda: torch.rand_like(ONES),
    "normal": lambda: torch.normal(0.0, 1.0, (5,)),
    "normal of tensors": lambda: torch.normal(ONES, ONES),
    "uniform": lambda: torch.empty(5).uniform_(),
    "exponential": lambda: torch.empty(5).exponential_(),
    "bernoulli": lambda: torch.bernoulli(ONES / 2),
    "multinomial": lambda: torch.multinomial(torch.ones(9), 4),
    "poisson": lambda: torch.poisson(ONES),
    "gamma": lambda: torch.distributions.Gamma(torch.ones(3), 1.0).sample(),
    "gumbel": lambda: F.gumbel_softmax(ONES),
    "rrelu": lambda: F.rrelu(-ONES, training=True),
    "pooling": lambda: F.fractional_max_pool2d(torch.randn(1, 1, 8, 8), 2, output_size=3),
    "truncated normal": lambda: nn.init.trunc_normal_(torch.empty(5)),
    "seeded by hand": lambda: (torch.manual_seed(5), torch.rand(3))[1],
}


class _NoOp(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def in_threads(num_threads, work):
    """Runs work(index) in threads that run steps; re-raises what one raised."""
    errors = []

    def run(index):
        try:
            step = StepRandom(5, 1, shares_process=True)
            with step.active():
                work(index, step)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


@pytest.mark.parametrize("under_mode", [False, True])
def test_every_draw_in_threads_is_that_of_a_plain_loop(under_mode):
    got = {}

    def work(index, step):
        for microbatch in range(6):
            for name, draw in DRAWS.items():
                step.begin("F", index, microbatch)
                if under_mode:
                    with _NoOp():
                        got[index, microbatch, name] = draw()
                else:
                    got[index, microbatch, name] = draw()

    state = torch.get_rng_state()
    in_threads(4, work)
    assert torch.equal(torch.get_rng_state(), state), "a draw has used the shared generator"
    for (index, microbatch, name), value in got.items():
        with rrfp.task_rng(5, 1, index, microbatch):
            assert torch.equal(value, DRAWS[name]()), f"{name}, {index}F{microbatch}"
    assert torch.random.default_generator is torch.default_generator


def test_a_task_that_draws_nothing_leaves_nothing_to_the_next():
    """Keys are due when a task first draws, and then must be those of the task that does."""
    def work(index, step):
        step.begin("F", index, 0)
        step.begin("B", index, 1)
        step.begin("F", index, 2)
        got[index] = torch.get_rng_state(), torch.rand(3), torch.rand(3)

    got = {}
    in_threads(2, work)
    for index, (state, first, second) in got.items():
        with rrfp.task_rng(5, 1, index, 2):
            assert torch.equal(state, torch.get_rng_state())
            assert torch.equal(first, torch.rand(3))
            assert torch.equal(second, torch.rand(3))


def test_a_generator_of_the_users_is_respected():
    def work(index, step):
        step.begin("F", 0, 0)
        own = torch.Generator().manual_seed(3)
        expected = torch.Generator().manual_seed(3)
        assert torch.equal(torch.rand(5, generator=own), torch.rand(5, generator=expected))
        first = torch.rand(5)
        step.begin("F", 0, 0)
        assert torch.equal(first, torch.rand(5)), "it has moved the thread's generator"

    in_threads(2, work)


def test_keys_differ_in_every_part():
    def first(*key):
        with rrfp.task_rng(*key):
            return torch.rand(4)

    base = (1, 2, 3, 4)
    for place in range(4):
        changed = [value + (place == index) for index, value in enumerate(base)]
        assert not torch.equal(first(*base), first(*changed))
    assert torch.equal(first(*base), first(*base))
    assert torch.equal(first(-1, 0, 0, 0), first(2**64 - 1, 0, 0, 0))


def losses_of(pipeline, num_steps, **options):
    batch = [torch.ones(2, 8)] * 3
    found = []
    for _ in range(num_steps):
        result = pipeline.step(batch, [None] * 3, lambda out, _: out.sum(), **options)
        found.append([loss.item() for loss in result.losses])
    return found


def make_stages():
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)) for _ in range(2)]


def test_the_state_resumes_the_masks():
    with rrfp.Pipeline(make_stages()) as pipeline:
        expected = losses_of(pipeline, 4, seed=9)
        assert pipeline.state_dict() == {"step": 4}
    assert expected[0] != expected[1]
    with rrfp.Pipeline(make_stages()) as pipeline:
        pipeline.load_state_dict({"step": 2})
        assert losses_of(pipeline, 2, seed=9) == expected[2:]
        for state, error in (({}, ValueError), ({"step": -1}, ValueError), ([], TypeError)):
            with pytest.raises(error):
                pipeline.load_state_dict(state)


def test_seed_none_is_torchs():
    results = []
    for seed, torch_seed in ((None, 7), (7, 3), (None, 8)):
        with rrfp.Pipeline(make_stages()) as pipeline:
            torch.manual_seed(torch_seed)
            results.append(losses_of(pipeline, 1, seed=seed))
    assert results[0] == results[1] != results[2]


def disagree(rank, num_ranks):
    """What each rank says when only the last has loaded a state, and that it lives on."""
    stages = make_stages()
    with rrfp.Pipeline(stages[rank]) as pipeline:
        batch = [torch.ones(2, 8)] * 3 if rank == 0 else None
        arguments = (batch, [None] * 3 if rank else None, lambda out, _: out.sum())
        pipeline.load_state_dict({"step": 5 * rank})
        with pytest.raises(ValueError, match="rank 0 counts 0, rank 1 5"):
            pipeline.step(*arguments)
        pipeline.load_state_dict({"step": 5})
        pipeline.step(*arguments)
        return pipeline.state_dict()


def test_ranks_that_count_differently_are_refused():
    assert worker_group(2).values(disagree) == [{"step": 6}] * 2


def test_a_draw_past_rrfp_gets_a_warning(caplog):
    class Escapes(nn.Linear):
        def forward(self, x):
            torch.default_generator.manual_seed(1)
            return super().forward(x)

    with caplog.at_level("WARNING", logger="rrfp"), rrfp.Pipeline(
        [Escapes(8, 8), nn.Linear(8, 8)]
    ) as pipeline:
        losses_of(pipeline, 2)
    assert caplog.text.count("default generator was used") == 1


class FailedDevice:
    """The generator of a device that takes no more work."""

    def get_state(self):
        return None

    def set_state(self, state):
        raise RuntimeError("CUDA error: device-side assert triggered")


def test_a_failed_device_does_not_hide_what_ended_the_step():
    with pytest.raises(rrfp.StallError, match="first"), _restored([FailedDevice()]):
        raise rrfp.StallError("first")
    with pytest.raises(RuntimeError, match="device-side"), _restored([FailedDevice()]):
        pass
