"""Writes docs/features.md from what the tests run: python docs/features.py."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests/python"))

from feature_pairs import ALTERNATIVES, FEATURES, REFUSED  # noqa: E402

WORKS, REFUSES, EXCLUDES, UNTESTED = "+", "x", "-", "."
# What is tested by itself or with a few others: what, by which test, and with which of FEATURES.
OTHERS = {
    "clipping, schedules": ("and what changes between steps",
                             "tests/python/test_training_loop.py::"
                             "test_random_loops_train_like_plain_torch",
                             ("deterministic", "measured", "weights", "scale", "frozen",
                              "accumulate", "evaluate", "shapes")),
    "checkpoints": ("resumed bit for bit, by other processes",
                    "tests/python/test_training_loop.py::test_checkpoints_go_on_bit_for_bit",
                    ("deterministic", "broadcast", "dropout")),
    "two hosts": ("over IPv6", "tests/distributed/test_two_hosts_ipv6.py::test_two_hosts_over_ipv6",
                  ("broadcast", "shapes")),
    "random graphs": ("stages of any graph", "tests/python/test_graphs.py::test_in_one_process",
                      ("split", "deterministic", "fixed", "frozen", "shapes", "chunks", "skip",
                       "graph")),
    "random graphs, tables": ("the same with what is given by microbatch",
                              "tests/python/test_graph_tables.py::test_in_one_process",
                              ("split", "deterministic", "fixed", "mid", "weights", "scale",
                               "outputs", "kwargs", "auxiliary", "frozen", "shapes", "chunks",
                               "skip", "graph")),
    "drawn graphs": ("each piece of work as often as in a plain loop",
                     "tests/python/test_graph_cover.py::test_matches_plain_loop",
                     ("split", "deterministic", "fixed", "kwargs", "auxiliary", "checkpoint",
                      "frozen", "chunks", "skip", "graph", "tied")),
    "fully_shard": ("a stage sharded over replicas", "tests/python/test_data_parallel.py::"
                    "test_fully_sharded_stages_in_an_agreement_group",
                    ("split", "deterministic", "accumulate", "group")),
}

HEAD = """# What works with what

Written by `python docs/features.py` from the tables that the tests use; do not edit.

`+` works, `x` is refused with an error that says why, `-` are two forms of one thing, `.` has no
test. Each `+` of the first table stands in a seeded case that is compared in float64 with a plain
loop, once with threads and once with processes (`tests/python/test_feature_pairs.py`), among about
twenty features at once. Three say where they are on: agreement groups and TCP are of processes
alone, and `torch.compile` between processes is tested by `tests/python/test_compiled.py`.
Hints, slack, limits, microbatch orders, delays and late messages have a pairwise cover of their own
(`tests/python/test_parity.py`), as have graphs (`tests/python/test_graphs.py`). All of this is on
CPUs; `pytest -m gpu` is what GPUs are tested with.
"""


def mark(name, other):
    pairs = {(name, other), (other, name)}
    return EXCLUDES if pairs & ALTERNATIVES else REFUSES if pairs & REFUSED.keys() else WORKS


def page():
    names = list(FEATURES)
    lines = [HEAD, "| | feature | " + " | ".join(str(i + 1) for i in range(len(names))) + " |",
             "|---|---|" + "---|" * len(names)]
    for row, name in enumerate(names):
        marks = []
        for column, other in enumerate(names):
            marks.append("" if column >= row else mark(name, other))
        lines.append(f"| {row + 1} | {FEATURES[name]} | " + " | ".join(marks) + " |")
    lines.append("\nRefused:\n")
    lines += [f"- {FEATURES[a]} with {FEATURES[b]}: {why}" for (a, b), why in REFUSED.items()]
    lines.append("\nTested by themselves and with some of these:\n")
    lines += ["| feature | test | " + " | ".join(str(i + 1) for i in range(len(names))) + " |",
              "|---|---|" + "---|" * len(names)]
    for name, (what, where, others) in OTHERS.items():
        file, _, function = where.partition("::")
        marks = [WORKS if other in others else UNTESTED for other in names]
        lines.append(f"| {name}: {what} | [{function}](../{file}) | " + " | ".join(marks) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    (ROOT / "docs/features.md").write_text(page())
