"""Writes docs/features.md from what the tests run: python docs/features.py."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests/python"))

from feature_pairs import FEATURES, REFUSED  # noqa: E402

WORKS, REFUSES, UNTESTED = "+", "x", "."
# What is tested by itself or with a few others: what, by which test, and with which of FEATURES.
OTHERS = {
    "agreement group": ("ranks that share a stage",
                        "tests/distributed/test_agreement.py::"
                        "test_gradients_equal_the_reference_and_orders_agree",
                        ("split", "deterministic", "fixed", "bytes", "mid")),
    "autocast": ("bfloat16 forwards", "tests/python/test_modes.py::test_autocast", ("fixed",)),
    "saved-tensor hooks": ("of the caller", "tests/python/test_modes.py::test_saved_tensor_hooks",
                           ()),
    "clipping, schedules": ("and what changes between steps",
                             "tests/python/test_training_loop.py::"
                             "test_random_loops_train_like_plain_torch",
                             ("deterministic", "bytes", "weights", "scale", "frozen", "accumulate",
                              "evaluate", "shapes")),
    "torch.compile": ("compiled stages",
                      "tests/python/test_compiled.py::test_compiled_stages",
                      ()),
    "checkpoints": ("resumed bit for bit, by other processes",
                    "tests/python/test_training_loop.py::test_checkpoints_go_on_bit_for_bit",
                    ("deterministic", "broadcast", "dropout")),
    "two hosts": ("over IPv6", "tests/distributed/test_two_hosts_ipv6.py::test_two_hosts_over_ipv6",
                  ("broadcast", "shapes")),
    "random graphs": ("stages of any graph", "tests/python/test_graphs.py::test_in_one_process",
                      ("split", "deterministic", "fixed", "chunks", "skip")),
}

HEAD = """# What works with what

Written by `python docs/features.py` from the tables that the tests use; do not edit.

`+` works, `x` is refused with an error that says why, `.` has no test. Each `+` of the first table
stands in a seeded case that is compared in float64 with a plain loop, once with threads and once
with processes (`tests/python/test_feature_pairs.py`), among about a dozen other features at once.
Hints, slack, limits, microbatch orders, delays and late messages have a pairwise cover of their own
(`tests/python/test_parity.py`), as have graphs (`tests/python/test_graphs.py`). All of this is on
CPUs; `pytest -m gpu` is what GPUs are tested with.
"""


def page():
    names = list(FEATURES)
    lines = [HEAD, "| | feature | " + " | ".join(str(i + 1) for i in range(len(names))) + " |",
             "|---|---|" + "---|" * len(names)]
    for row, name in enumerate(names):
        marks = []
        for column, other in enumerate(names):
            refused = (name, other) in REFUSED or (other, name) in REFUSED
            marks.append("" if column >= row else REFUSES if refused else WORKS)
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
