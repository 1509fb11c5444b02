"""docs/from_pipelining.md: its blocks train one model alike, in pairs, and its names exist.

Would catch: a block that has gone stale on either side, a class or hint that is no more.
"""

import re
from pathlib import Path

import pytest
import torch
import torch.distributed.pipelining
from parity_group import worker_group
from torch import nn

from rrfp.hints import NAMES

PAGE = (Path(__file__).resolve().parents[2] / "docs/from_pipelining.md").read_text()
P = 3


def run_block(rank, ranks, block, seed):
    """Losses and the gradients of this rank's stages, of one block."""
    torch.manual_seed(seed)
    model = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()).double() for _ in range(2 * ranks)]
    chunks = {index: model[index] for index in (rank, rank + ranks)}
    names = {"rank": rank, "ranks": ranks, "stage_module": model[rank], "chunks": chunks,
             "device": torch.device("cpu"), "loss_fn": nn.functional.mse_loss,
             "inputs": torch.randn(24, 8).double(), "targets": torch.randn(24, 8).double()}
    exec(block, names)
    losses = [float(loss) for loss in names["losses"] or []]
    return losses, [[p.grad.tolist() for p in chunk.parameters() if p.grad is not None]
                    for chunk in chunks.values()]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("stages_per_rank", (1, 2))
def test_both_blocks_train_alike(stages_per_rank, seed):
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 4
    pair = blocks[2 * stages_per_rank - 2:2 * stages_per_rank]
    theirs, ours = (worker_group(P).values(run_block, block, seed) for block in pair)
    assert len(theirs[-1][0]) == 8 and not theirs[0][0]
    for (their_losses, their_grads), (our_losses, our_grads) in zip(theirs, ours, strict=True):
        assert our_losses == pytest.approx(their_losses, rel=1e-12)
        assert [len(chunk) for chunk in our_grads] == [2, 2 * (stages_per_rank - 1)]
        for got, want in zip(sum(our_grads, []), sum(their_grads, []), strict=True):
            torch.testing.assert_close(torch.tensor(got).double(), torch.tensor(want).double(),
                                       rtol=1e-10, atol=1e-14)


def test_what_it_names_is_there():
    classes = set(re.findall(r"\bSchedule[A-Z0-9]\w+|\bPipelineStage\b|\bSplitPoint\b", PAGE))
    assert len(classes) == 9
    assert all(hasattr(torch.distributed.pipelining, name) for name in classes)
    row = next(line for line in PAGE.splitlines() if "`ScheduleGPipe`" in line)
    assert set(re.findall(r'`"([\w-]+)"`', row)) <= set(NAMES)
