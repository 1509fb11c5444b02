"""Before a step: Ctrl-C while a rank draws its microbatches reaches every rank, and a stage that
cannot run yet is refused.

Would catch: ranks that wait for one which has left the call without a word.
"""

import parity_model as model
import pytest
import torch
from parity_group import worker_group

import rrfp


def interrupted(inputs):
    yield inputs[0]
    raise KeyboardInterrupt


def draw_and_be_interrupted(rank, num_ranks):
    """(kind of error of the interrupted call, losses of the next, where they are)."""
    stage = model.RecordingStage(5, rank, torch.float64)
    inputs, targets, _ = model.make_batch(5, 0, 4, torch.float64)
    told = None

    def run(microbatches):
        return rrfp.run_pipeline(
            {rank: stage}, microbatches if rank == 0 else None,
            targets if rank == num_ranks - 1 else None, model.squared_error,
            num_microbatches=4, stall_timeout_s=60.0)

    try:
        run(interrupted(inputs))
    except BaseException as error:
        told = type(error).__name__
    return told, len(run(inputs).losses or [])


def test_an_interrupt_among_the_microbatches_is_told_to_all():
    answers = worker_group(2).values(draw_and_be_interrupted)
    assert [told for told, _ in answers] == ["KeyboardInterrupt", "InterruptedStepError"]
    assert [count for _, count in answers] == [0, 4], "not built anew"


def test_a_lazy_stage_is_named():
    stages = [torch.nn.Linear(4, 4), torch.nn.LazyLinear(4)]
    batch = torch.randn(4, 4).chunk(2)
    with pytest.raises(ValueError, match="parameter weight of stage 1 is lazy"):
        rrfp.run_pipeline(stages, batch, batch, torch.nn.functional.mse_loss)
    stages[1](batch[0])
    rrfp.run_pipeline(stages, batch, batch, torch.nn.functional.mse_loss)
