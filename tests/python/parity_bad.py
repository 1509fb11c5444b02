"""Wrong arguments, each with what its error must say. Used in one process and across processes.

A ``Bad`` changes the good call of ``good_call()``: ``change(rank)`` gives the arguments to
replace on that rank (in one process rank is None: all stages are there).
"""

import math
from dataclasses import dataclass, field

import parity_model as model
import torch

NUM_RANKS = 3
NUM_MICROBATCHES = 4
NAN = math.nan


@dataclass
class Bad:
    """``words`` must all stand in the message; ``where`` limits it to one process mode."""

    change: object
    words: list
    error: str = "ValueError"
    where: str = "both"
    values: dict = field(default_factory=dict)

    def arguments(self, rank):
        return self.change(rank) if callable(self.change) else self.change


def good_call(rank):
    """Stages and arguments of a call that is right; rank None: one process with all stages."""
    stages = [model.RecordingStage(5, s, torch.float64) for s in range(NUM_RANKS)]
    inputs, targets, costs = model.make_batch(5, 0, NUM_MICROBATCHES, torch.float64)
    arguments = {
        "stages": stages if rank is None else {rank: stages[rank]},
        "microbatches": inputs if rank in (None, 0) else None,
        "targets": targets if rank in (None, NUM_RANKS - 1) else None,
        "loss_fn": model.squared_error,
        "costs": costs,
        "stall_timeout_s": 30.0,
    }
    return stages, arguments


def order(change=None):
    """GPipe's order of the good call as task texts, changed by ``change(list)``."""
    texts = [t for s in range(NUM_RANKS) for t in model.gpipe_texts(s, range(NUM_MICROBATCHES))]
    if change:
        change(texts)
    return texts


def on_rank(index, **arguments):
    """A change on one rank only."""
    return lambda rank: arguments if rank == index else {}


def source(rank, **arguments):
    return arguments if rank in (None, 0) else {}


def options(name, values, words, **more):
    """One Bad per value of an option; each message must name the option and the value."""
    return {f"{name}={value!r:.40}": Bad({name: value}, [*words, name], **more) for value in values}


def raises_for_2f1(task, state):
    if str(task) == "2F1":
        raise KeyError("broken on purpose")
    return 0


BAD = {
    "order omits": Bad({"hint": order(lambda t: t.remove("1B2"))},
                       ["1B2 of rank 1", "7 of the 8 tasks"]),
    "order repeats": Bad({"hint": order(lambda t: t.append("2F0"))}, ["2F0", "twice"]),
    "order invents": Bad({"hint": order(lambda t: t.append("7F0"))}, ["7F0"]),
    "order invents microbatch": Bad({"hint": order(lambda t: t.append("1F9"))}, ["1F9"]),
    "order with I": Bad({"hint": order(lambda t: t.__setitem__(-1, "2I3"))}, ["0B0", "F, I and W"]),
    "order malformed": Bad({"hint": order(lambda t: t.append("2f0"))}, ["2f0"]),
    "order of numbers": Bad({"hint": [1, 2, 3]}, ["hint"], "TypeError"),
    "order empty": Bad({"hint": []}, ["hint"]),
    "order that waits for itself": Bad(
        {"hint": order(lambda t: t.insert(0, t.pop(t.index("0B3")))), "slack": 0}, ["0B3"]
    ),
    "order of forwards that differs, slack bounded": Bad(
        {"hint": order(lambda t: t.insert(0, t.pop(t.index("0F2")))), "slack": 1},
        ["1F2", "slack 1"],
    ),
    "order with another microbatch order": Bad(
        {"hint": order(), "microbatch_order": "mid"}, ["microbatch_order", "given"]
    ),
    "limit below the order's peak": Bad(
        {"hint": "1f1b", "slack": 0, "max_in_flight": 2}, ["max_in_flight", "2", "3"]
    ),
    "limit list too short": Bad({"max_in_flight": [2, 2]}, ["max_in_flight", "2", "3"]),
    "limit list with 0": Bad({"max_in_flight": [2, 0, 2]},
                             ["max_in_flight[1] is 0; it must be at least 1 microbatch."]),
    "limit 0 on one rank": Bad(
        on_rank(1, max_in_flight=0), ["rank 1: max_in_flight is 0; it must be at least 1"],
        where="processes"),
    "limit of no bytes": Bad({"max_in_flight": "0B"}, ["must be at least 1 byte. For"]),
    "limit beyond an int": Bad({"max_in_flight": 2**31}, ["below 2**31 microbatches."]),
    "mid without costs": Bad({"microbatch_order": "mid", "costs": None}, ["mid", "costs"]),
    "costs too short": Bad({"costs": [1.0, 2.0]}, ["costs", "2", "4"]),
    "costs nan": Bad({"costs": [1.0, NAN, 1.0, 1.0]}, ["costs", "nan"]),
    "costs negative": Bad({"costs": [1.0, -2.0, 1.0, 1.0]}, ["costs", "-2"]),
    "costs infinite": Bad({"costs": [1.0, math.inf, 1.0, 1.0]}, ["costs", "inf"]),
    "order too short": Bad({"microbatch_order": [0, 1, 2]}, ["microbatch_order"]),
    "order repeats microbatch": Bad({"microbatch_order": [0, 1, 1, 2]}, ["microbatch_order", "1"]),
    "order out of range": Bad({"microbatch_order": [0, 1, 2, 4]}, ["microbatch_order", "4"]),
    "order negative": Bad({"microbatch_order": [0, 1, 2, -1]}, ["microbatch_order", "-1"]),
    "weights too short": Bad({"loss_reduction": [1.0, 2.0]}, ["loss_reduction", "2", "4"]),
    "weights nan": Bad({"loss_reduction": [1.0, NAN, 1.0, 1.0]}, ["loss_reduction", "nan"]),
    "targets of another length": Bad(
        lambda r: {"targets": [0.0] * 3} if r in (None, 2) else {}, ["targets", "3", "4"]
    ),
    "microbatches empty": Bad(lambda r: source(r, microbatches=[]), ["microbatches"]),
    "microbatches nowhere": Bad({"microbatches": None}, ["microbatches"]),
    "iterator without a number": Bad(
        lambda r: source(r, microbatches=iter([(torch.ones(1, model.WIDTH), 0)])),
        ["num_microbatches"],
    ),
    "iterator ends early": Bad(
        lambda r: {
            **source(r, microbatches=iter([(torch.ones(1, model.WIDTH), 0)] * 2)),
            "num_microbatches": 4,
        },
        ["2", "4"],
    ),
    "loss without targets": Bad({"targets": None}, ["targets"]),
    "microbatches without an order of their own": Bad(
        lambda r: source(r, microbatches=torch.utils.data.DataLoader([0.0] * 4)),
        ["microbatches is a DataLoader", "iter(...)", "num_microbatches"], "TypeError"),
    "loss_fn in the place of targets": Bad(
        {"targets": model.squared_error, "loss_fn": None},
        ["targets is a function", "loss_fn="], "TypeError"),
    "loss_fn missing": Bad({"loss_fn": None}, ["loss_fn"]),
    "loss_fn not callable": Bad({"loss_fn": 3}, ["loss_fn"], "TypeError"),
    "stage_kwargs too short": Bad(
        lambda r: source(r, stage_kwargs={0: [{}] * 3}), ["stage_kwargs", "3", "4"]
    ),
    "stage_kwargs of nobody": Bad(
        lambda r: source(r, stage_kwargs={9: [{}] * 4}), ["stage_kwargs", "9"]
    ),
    "stage_kwargs on another rank alone": Bad(
        lambda r: source(r, stage_kwargs={1: [{}] * 4}), ["stage_kwargs[1]", "rank 0", "rank 1"],
        where="processes"),
    "costs beyond a float": Bad({"costs": [10**400, 1.0, 1.0, 1.0]}, ["costs[0]", "number"],
                                "TypeError"),
    "grad_scale beyond a float": Bad({"grad_scale": 10**400}, ["grad_scale"], "TypeError"),
    "limit beyond a float": Bad({"max_in_flight": "9" * 400 + "GiB"}, ["max_in_flight"]),
    **options("hint", ["zigzag", "", "1F1B "], ["1f1b", "{rank: list", "callable"]),
    **{f"hint spelled {text}": Bad({"hint": text}, [f"Did you mean '{name}'?"])
       for text, name in (("1F1B", "1f1b"), ("zb_h1", "zb-h1"), ("interleave", "interleaved"))},
    **{f"{option} spelled {text}": Bad({option: text}, [f"Did you mean '{name}'?"])
       for option, text, name in (
           ("slack", "Auto", "auto"), ("loss_reduction", "Mean", "mean"),
           ("microbatch_order", "Mid", "mid"), ("lookahead", "jitt", "jit"),
           ("placement", "Loop", "loop"), ("transport", "Auto", "auto"))},
    "hint that splits, without": Bad({"hint": "zb-h1", "split_backward": False},
                                     ["zb-h1", "use split_backward=True"]),
    **options("hint", [None, 3.5], ["1f1b", "{rank: list", "callable"], error="TypeError"),
    "callable hint that raises": Bad({"hint": raises_for_2f1}, ["hint", "2F1", "KeyError"]),
    "callable hint that lacks costs": Bad({"hint": lambda t, s: s.costs[0], "costs": None},
                                          ["hint", "0F0", "pass costs"]),
    "callable hint that answers a text": Bad({"hint": lambda t, s: "x"}, ["hint", "'x'", "0F0"],
                                             "TypeError"),
    "callable hint that answers nan": Bad({"hint": lambda t, s: NAN}, ["hint", "nan", "0F0"]),
    "callable hint with an order of microbatches": Bad(
        {"hint": lambda t, s: 0, "microbatch_order": "mid"}, ["hint", "callable", "given"]),
    "callable hint that can never finish at slack 0": Bad(
        {"hint": lambda t, s: t.kind == "F", "slack": 0}, ["circle", "slack 0"]),
    **options("num_microbatches", [-1, 0, 3], []),
    **options("num_microbatches", ["4", 4.5], [], error="TypeError"),
    **options("max_in_flight", [0, -1], []),
    **options("max_in_flight", ["banana", "1f1b+x", "24XiB", "0B"], []),
    **options("max_in_flight", [1.5, NAN, {}], [], error="TypeError"),
    "bytes at slack 0": Bad({"max_in_flight": "1KiB", "slack": 0, "hint": "1f1b"},
                            ["max_in_flight", "1KiB", "slack 0"]),
    "bytes too few for a microbatch": Bad(
        {"max_in_flight": "1KiB", "activation_bytes": {0: 5, 1: [7, 7, 2000, 7], 2: 5}},
        ["max_in_flight", "1.00 KiB", "rank 1", "microbatch 2", "1.95 KiB"]),
    "activation_bytes of too few microbatches": Bad(
        {"activation_bytes": {1: [1, 2, 3]}}, ["activation_bytes[1]", "3", "4"]),
    "activation_bytes of no stage": Bad({"activation_bytes": {3: 1}}, ["activation_bytes", "3"]),
    **options("activation_bytes", [-1, 2**47, "5", "2 gigs"], []),
    **options("activation_bytes", [1.5, [1], {0: None}, True], [], error="TypeError"),
    **options("slack", [-1, "soon"], []),
    **options("slack", [1.5, []], [], error="TypeError"),
    **options("microbatch_order", ["sideways"], ["mid"]),
    **options("loss_reduction", ["median", []], []),
    **options("grad_scale", [NAN, math.inf], []),
    **options("grad_scale", ["big"], [], error="TypeError"),
    **options("stall_timeout_s", [0, -1.0, NAN], []),
    **options("stall_timeout_s", ["long"], [], error="TypeError"),
    **options("transport", ["pigeon"], ["auto"]),
    **options("lookahead", ["never", 0, 2], ["'jit'", "'eager'", "1"]),
    **options("lookahead", [None, True, 1.0], ["'jit'", "'eager'", "1"], error="TypeError"),
    **options("split_backward", [2], [], error="TypeError"),
    **options("seed", [2**64], ["64 bits"]),
    **options("seed", [0.5, "x"], [], error="TypeError"),
    **options("edges", [[(0, 1), (1, 2), (2, 0)], [(0, 1), (1, 7)], [(0, 1), (1, 1), (1, 2)]], []),
    "edges that are wrong beside loss_stages": Bad(
        {"edges": [(0, 1), (1, 7)], "loss_stages": [2, 1]}, ["edges", "loss_stages [1, 2]"]),
    **options("edges", [[(0, 1)]], ["stage 2 stands in no edge", "loss_stages"]),
    **options("loss_stages", [[5], []], []),
    "an order of microbatches that raises": Bad(
        {"microbatch_order": lambda costs: costs[99]}, ["microbatch_order", "IndexError"]),
    "a limit beyond what can be counted": Bad(
        {"max_in_flight": "4194304TiB"}, ["max_in_flight", "4194304TiB", "2**62"]),
    **options("tied", [[(0, "scale"), (1, "scale")], [(0, "scale"), (1, "gain")]], ["stage 1"]),
    **options("tied", [3], [], error="TypeError"),
    **options("placement", ["spiral", [0, 1], [0, 1, -1], [0, 0, 2]], []),
    **options("num_ranks", [0, 5], []),
    # In one process only.
    "no stages": Bad({"stages": []}, ["stages"], where="threads"),
    "stage twice": Bad(
        lambda r: {"stages": [model.RecordingStage(1, 0, torch.float64)] * 3},
        ["twice"],
        where="threads",
    ),
    "not a module": Bad({"stages": [3, 4]}, ["stages"], "TypeError", where="threads"),
    "stage missing in the dict": Bad(
        lambda r: {"stages": dict.fromkeys([0, 2], model.RecordingStage(1, 0, torch.float64))},
        ["1"],
        where="threads",
    ),
    # Between processes only: ranks that disagree.
    "ranks disagree on hint": Bad(
        on_rank(1, hint="gpipe"), ["hint", "auto", "gpipe", "rank 1"], where="processes"
    ),
    "ranks disagree on slack": Bad(
        on_rank(2, slack=2), ["slack", "2", "rank 2"], where="processes"
    ),
    "ranks disagree on M": Bad(
        on_rank(2, num_microbatches=7), ["4", "7", "rank 2"], where="processes"
    ),
    "ranks disagree on activation_bytes": Bad(
        lambda rank: {"max_in_flight": "1KiB", "activation_bytes": 10 + rank},
        ["activation_bytes", "rank 0", "10", "11"], where="processes"),
    "ranks disagree on bytes": Bad(
        on_rank(1, max_in_flight="1KiB"), ["max_in_flight", "1024 B"], where="processes"),
    "ranks disagree on limit": Bad(
        on_rank(0, max_in_flight=2), ["max_in_flight", "2"], where="processes"
    ),
    "ranks disagree on reduction": Bad(
        on_rank(1, loss_reduction="sum"), ["loss_reduction", "mean", "sum"], where="processes"
    ),
    "ranks disagree on costs": Bad(
        on_rank(1, costs=[9.0, 1.0, 1.0, 1.0]), ["costs", "9"], where="processes"
    ),
    "ranks disagree on forward_only": Bad(
        on_rank(1, forward_only=True), ["forward_only", "rank 1"], where="processes"
    ),
    "a group of rank numbers": Bad(
        {"group": [0, 1, 2]}, ["group is [0, 1, 2], a list", "new_group"], "TypeError",
        where="processes"),
    "microbatches on two ranks": Bad(
        on_rank(1, microbatches=[(torch.ones(1, model.WIDTH), 0)] * 4),
        ["microbatches", "rank 1"],
        where="processes",
    ),
    "wrong on one rank only": Bad(
        on_rank(1, slack=-4), ["slack", "-4", "rank 1"], where="processes"
    ),
}
for flag in ("forward_only", "deterministic", "return_outputs", "broadcast_loss",
             "add_in_products", "split_backward"):
    BAD |= options(flag, ["False", torch.ones(2)], ["True or False"], error="TypeError")
