"""Wrong arguments that break a check rather than fail it: arrays, tensors without dimensions or
without values, iterators that raise, and what one rank alone gives wrong before its set-up.
"""

import numpy as np
import torch
from parity_bad import NUM_MICROBATCHES, Bad, on_rank, options
from parity_model import RecordingStage

NO_VALUES = torch.zeros(NUM_MICROBATCHES, dtype=torch.long, device="meta")


def broken():
    raise KeyError("broken on purpose")
    yield


BAD = {
    **options("hint", [{0: None}, {0: "0F0"}], ["for rank 0", "task texts"], error="TypeError"),
    **options("hint", [{"a": 1}], ["'a', a str", "{rank: list of task texts}"], error="TypeError"),
    **options("placement", [np.arange(3)], ["use 'loop', 'v' or a list of ranks"]),
    **options("transport", [np.arange(3)], ["auto"]),
    **options("agreement_group", [np.arange(3)], ["a ndarray", "process group"], error="TypeError",
              where="processes"),
    **options("num_ranks", [np.arange(3)], []),
    **options("edges", [torch.tensor(1)], ["tensor(1); pass a list"], error="TypeError"),
    **options("loss_stages", [torch.tensor(1)], ["tensor(1); pass a list"], error="TypeError"),
    **options("tied", [torch.tensor(1), [torch.tensor(1)]], ["tensor(1)"], error="TypeError"),
    **options("microbatch_order", [NO_VALUES, [*NO_VALUES], {0, 1, 2, 3}, 3], [],
              error="TypeError"),
    "a callable order without values": Bad({"microbatch_order": lambda costs: NO_VALUES},
                                           ["values cannot be read", "meta"], "TypeError"),
    "a callable order that raises late": Bad(
        {"microbatch_order": lambda costs: broken()}, ["microbatch_order", "KeyError"]),
    **options("costs", [NO_VALUES], ["values cannot be read", "meta"], error="TypeError"),
    **options("costs", [[*NO_VALUES], np.array(1.0)], [], error="TypeError"),
    **options("loss_reduction", [NO_VALUES], ["values cannot be read"], error="TypeError"),
    **{f"{name} that raise on one rank": Bad(
        lambda rank, name=name: {name: broken()} if rank == 1 else {},
        ["rank 1: KeyError: 'broken on purpose'"], where="processes")
       for name in ("edges", "loss_stages", "tied")},
    **{f"a rank without a stage, {stages!r}": Bad(
        on_rank(2, stages=stages, targets=None),
        [f"rank 2: stages is {stages!r}", "each of the 3 ranks", "group="], where="processes")
       for stages in ({}, None, torch.nn.ModuleDict())},
    "fewer stages than ranks": Bad(
        lambda rank: {"stages": {rank % 2: RecordingStage(5, rank % 2, torch.float64)}},
        ["stage 0 is on rank 0 and on rank 2", "group="], where="processes"),
    "a stage that no rank has": Bad(
        lambda rank: {"stages": {2 * rank: RecordingStage(5, 2 * rank, torch.float64)}},
        ["stage 1 is missing", "a rank passes several"], where="processes"),
    "agreement_group wrong on one rank": Bad(
        on_rank(1, agreement_group="nonne"), ["rank 1: agreement_group is", "mean 'none'?"],
        where="processes"),
}
