"""The settings of ``graph_cover`` and the graph of stages that each row of them means."""

import random
from dataclasses import asdict, dataclass

FACTORS = {
    "mode": ["threads", "processes"],
    "chunks": [1, 2],
    "placement": ["loop", "v", "list"],
    "lower": [False, True],  # an edge leads to a stage of a lower number
    "skip": [False, True],
    "join": [False, True],  # of two source stages
    "several_losses": [False, True],
    "hint": ["auto", "gpipe", "1f1b", "interleaved", "zb-h1", "zbv", "bf", "bfw", "fb",
             "b-priority", "f-priority", "order", "callable"],
    "slack": [0, 3, None, "auto"],
    "limit": ["default", "least", "more"],
    "split": [None, True],
    "deterministic": [False, True],
    "checkpoint": ["none", "reentrant", "plain"],
    "frozen": [False, True],
    "aux_loss": [False, True],
    "tied": [False, True],
    "kwargs": [False, True],
}
CHAIN_HINTS = ("1f1b", "zb-h1", "interleaved", "zbv")


def is_allowed(first, second):
    """Whether two (factor, value) pairs may stand in one case."""
    pair = dict([first, second])
    hint = pair.get("hint")
    if hint in CHAIN_HINTS and any(pair.get(name) for name in ("lower", "skip", "join")):
        return False
    wanted = {"1f1b": 1, "zb-h1": 1, "zbv": 2}
    if hint in wanted and pair.get("chunks", wanted[hint]) != wanted[hint]:
        return False
    placed = {"interleaved": "loop", "zbv": "v"}
    if hint in placed and pair.get("placement", placed[hint]) != placed[hint]:
        return False
    # A fixed order has a peak of its own.
    return not (pair.get("slack", 1) == 0 and pair.get("limit") == "least")


@dataclass(frozen=True)
class Case:
    seed: int
    mode: str
    chunks: int
    placement: str
    lower: bool
    skip: bool
    join: bool
    several_losses: bool
    hint: str
    slack: int | str | None
    limit: str
    split: bool | None
    deterministic: bool
    checkpoint: str
    frozen: bool
    aux_loss: bool
    tied: bool
    kwargs: bool

    def __str__(self):
        return "-".join(str(value) for value in asdict(self).values())

    num_microbatches = 5

    @property
    def num_ranks(self):
        return 4 if self.chunks == 1 else 2

    num_stages = 4

    @property
    def topological(self):
        """Stages, each behind those it waits for."""
        return [0, 2, 1, 3] if self.lower else [0, 1, 2, 3]

    @property
    def edges(self):
        a, b, c, d = self.topological
        edges = [(a, c), (b, c), (c, d)] if self.join else [(a, b), (b, c), (c, d)]
        return sorted({*edges, *([(b, d)] if self.skip else [])})

    @property
    def loss_stages(self):
        return sorted({self.topological[3], *(self.topological[1:2] * self.several_losses)})

    @property
    def rank_of_stage(self):
        if self.placement == "list":
            if self.hint in ("1f1b", "zb-h1"):
                return [3, 2, 1, 0]
            ranks = [*range(self.num_ranks)] * self.chunks
            random.Random(self.seed).shuffle(ranks)
            return ranks
        return [0, 1, 1, 0] if self.placement == "v" and self.chunks == 2 else [
            stage % self.num_ranks for stage in range(4)]

    def sources_of(self, stage):
        return [source for source, target in self.edges if target == stage]

    @property
    def source_stages(self):
        return [stage for stage in range(4) if not self.sources_of(stage)]

    @property
    def frozen_stage(self):
        """No source with a loss of its own: that would not train at all."""
        return self.topological[2 if self.several_losses else 1] if self.frozen else None

    @property
    def tied_groups(self):
        a, _, _, d = self.topological
        return [(a, "scale"), (d, "scale")] if self.tied else None

    def hint_argument(self):
        if self.hint == "callable":
            return last_first
        if self.hint != "order":
            return self.hint
        kinds = "IW" if self.split or self.deterministic else "B"
        forwards = [f"{s}F{m}" for m in range(5) for s in self.topological]
        return forwards + [f"{s}{kind}{m}" for m in range(5) for s in self.topological[::-1]
                           for kind in kinds]

    def options(self):
        return {
            "edges": self.edges,
            "loss_stages": self.loss_stages,
            "placement": self.rank_of_stage if self.placement == "list" else self.placement,
            "num_ranks": self.num_ranks,
            "hint": self.hint_argument(),
            "slack": self.slack,
            "max_in_flight": {"default": None, "least": self.chunks, "more": 25}[self.limit],
            "split_backward": self.split,
            "deterministic": self.deterministic,
            "tied": self.tied_groups,
            "loss_reduction": "sum",
            "stall_timeout_s": 30.0,
        }


def last_first(task, state):
    """A callable hint that is a possible order: all forwards before the rest, last ones first."""
    return (task.kind != "F") * 100 - task.microbatch
