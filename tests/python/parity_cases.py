"""The cases of the parity suite: a seeded pairwise cover over everything a user can turn."""

import random
from dataclasses import asdict, dataclass

import parity_model as model
from pairwise import rows_of_cover

FACTORS = {
    "mode": ["threads", "processes"],
    "num_ranks": [1, 2, 3, 4],
    "count": ["1", "2", "P", "2P+1", "16"],
    "hint": ["gpipe", "1f1b", "bf", "fb", "b-priority", "f-priority", "auto", "user",
             "bfw", "zb-h1"],
    "split": [None, True],
    "deterministic": [False, True],
    "slack": [0, 3, None, "auto"],
    "limit": ["least", "list", "P", "2P", "1f1b+2", "default", "unlimited",
              "bytes", "bytes and units", "measured bytes"],
    "reduction": ["mean", "sum", "weights"],
    "order": ["given", "mid", "list", "callable"],
    "dtype": ["float64", "float32"],
    "delays": ["none", "random", "straggler", "stall"],
    "late_messages": [False, True],
    "steps": [1, 2],
    "grad_scale": [None, 8.0],
    "surface": ["run_pipeline", "Pipeline"],
}


@dataclass(frozen=True)
class Case:
    """One row of the cover. ``seed`` fixes weights, data, delays and orders."""

    seed: int
    mode: str
    num_ranks: int
    count: str
    hint: str
    split: bool | None
    deterministic: bool
    slack: int | str | None
    limit: str
    reduction: str
    order: str
    dtype: str
    delays: str
    late_messages: bool
    steps: int
    grad_scale: float | None
    surface: str

    def __str__(self):
        values = [str(value) for key, value in asdict(self).items() if key != "seed"]
        return f"{self.seed}-" + "-".join(values)

    @property
    def num_microbatches(self):
        p = self.num_ranks
        return {"1": 1, "2": 2, "P": p, "2P+1": 2 * p + 1, "16": 16}[self.count]

    @property
    def user_order(self):
        return model.random_valid_order(
            self.seed, self.num_ranks, self.num_microbatches, same_forwards=self.slack == 3
        )

    def microbatch_order(self, costs):
        """The step's order, as the definitions say; costs are those of the step."""
        m = self.num_microbatches
        if self.order == "mid":
            return model.mid_order(costs)
        if self.order == "list":
            return random.Random(self.seed).sample(range(m), m)
        if self.order == "callable":
            return longest_first(costs)
        return list(range(m))

    def fixed_texts(self, stage, costs):
        """What a stage runs at slack 0, for the hints whose order is known from outside."""
        order = self.microbatch_order(costs)
        if self.hint == "gpipe":
            return model.gpipe_texts(stage, order)
        if self.hint == "1f1b":
            return model.one_f_one_b_texts(stage, self.num_ranks, order)
        if self.hint == "user":
            return [text for text in self.user_order if text.startswith(str(stage))]
        return None

    def activation_bytes(self, costs):
        """By stage and microbatch; None where the limit is not in bytes, or sizes are measured."""
        if self.limit not in ("bytes", "bytes and units") or self.slack == 0:
            return None
        return {s: [round(100 * cost) + s for cost in costs] for s in range(self.num_ranks)}

    def max_in_flight(self):
        """The limit asked for; with slack 0 never less than the order's own peak."""
        p, named = self.num_ranks, self.limit
        if named in ("default", "1f1b+2") and not (named == "1f1b+2" and self.slack == 0):
            return None if named == "default" else named
        if named == "unlimited":
            return 10_000
        if "bytes" in named:  # lengths are up to 5
            if self.slack == 0:
                return None
            sizes = {"bytes": "900B", "measured bytes": "0.6KiB"}
            return sizes.get(named) or ["900B" if s % 2 == 0 else 2 for s in range(p)]
        wanted = {"least": [1] * p, "list": [1 + s % 3 for s in range(p)], "1f1b+2": [1] * p}
        limits = wanted.get(named, [p if named == "P" else 2 * p] * p)
        if self.slack == 0:
            texts = [self.fixed_texts(s, list(range(self.num_microbatches))) for s in range(p)]
            if texts[0] is None:
                return None  # a rule's peak is the rule's own business
            limits = [max(k, model.peak_units(t)) for k, t in zip(limits, texts, strict=True)]
        return limits if named == "list" or len(set(limits)) > 1 else limits[0]


def longest_first(costs):
    return sorted(range(len(costs)), key=lambda m: (-costs[m], m))


def is_allowed(first, second):
    """Whether two (factor, value) pairs may stand in one case."""
    pair = dict([first, second])
    # An order of the user names the caller's indices, so it needs the caller's order.
    # It also says itself whether backwards are split, and in which order they run.
    if pair.get("hint") == "user":
        return pair.get("order", "given") == "given" and not (
            pair.get("split") or pair.get("deterministic")
        )
    return True


def pairwise_cover(seed, at_least):
    """At least that many cases, in which every allowed pair of values occurs."""
    rows = rows_of_cover(FACTORS, is_allowed, seed, at_least)
    return [Case(seed=row_seed, **row) for row_seed, row in rows]


def sizes_text(cases):
    """How many cases of what, for the log of the run."""
    parts = [f"{len(cases)} cases"]
    for mode in FACTORS["mode"]:
        for p in FACTORS["num_ranks"]:
            count = sum(c.mode == mode and c.num_ranks == p for c in cases)
            parts.append(f"{mode} P{p}: {count}")
    return ", ".join(parts)
