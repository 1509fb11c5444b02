"""Hints: which task a rank prefers when several are ready.

By name: ``auto``, ``1f1b``, ``gpipe``, ``bf``, ``bfw``, ``fb``, ``b-priority``, ``f-priority``,
``zb-h1``. Or a
user's own order: a list of the task texts of all ranks (each rank takes its own, as they
stand), or ``{rank: [texts]}``.
"""

from collections.abc import Mapping, Sequence

from rrfp import _C
from rrfp.tasks import Task

NAMES = ("auto", "1f1b", "gpipe", "bf", "bfw", "fb", "b-priority", "f-priority", "zb-h1")
SPLIT_HINTS = ("bfw", "zb-h1", "zbv")  # rank W tasks, so backwards are split
_LATER = ("interleaved", "zbv")


def normalise_hint(hint):
    """(name, order) of a hint argument; order is a list of task texts, empty for a name.

    Raises:
        ValueError: An unknown name, or a text that is not a task.
        TypeError: Neither a name nor task texts.
    """
    if isinstance(hint, str):
        if hint in NAMES:
            return hint, []
        if hint in _LATER:
            raise ValueError(f"hint {hint!r} is not supported yet; choose one of {NAMES}.")
        raise ValueError(f"hint {hint!r} is not known; choose one of {NAMES}, or list the tasks.")
    if callable(hint):
        raise ValueError("a callable hint is not supported yet; list the task texts instead.")
    if isinstance(hint, Mapping):
        texts = [text for rank in sorted(hint) for text in hint[rank]]
    elif isinstance(hint, Sequence):
        texts = list(hint)
    else:
        raise TypeError(
            f"hint is a {type(hint).__name__}; pass a name out of {NAMES}, a list of task texts, "
            "or {rank: list of task texts}."
        )
    for text in texts:
        if not isinstance(text, (str, Task)):
            raise TypeError(
                f"hint lists {text!r}, a {type(text).__name__}; list task texts such as '2F0'."
            )
    texts = [str(text) for text in texts]
    if not texts:
        raise ValueError("hint is an empty order; list every task of every rank.")
    for text in texts:
        _C.parse_task(text)
    return "order", texts


def has_halves(order):
    """Whether an order of task texts lists input and weight gradients (I, W), not full backwards.

    An order of forwards alone lists neither, and counts as one of full backwards.
    """
    return any(_C.parse_task(text)[1] in "IW" for text in order)
