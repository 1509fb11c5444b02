"""Hints: which task a rank prefers when several are ready.

By name: ``auto``, ``1f1b``, ``gpipe``, ``bf``, ``bfw``, ``fb``, ``b-priority``, ``f-priority``,
``zb-h1``, ``interleaved``, ``zbv``. Or a user's own order: a list of the task texts of all ranks
(each rank takes its own, as they stand), ``{rank: [texts]}``, or a schedule file of torch's
(``schedule_csv.py``), or a callable (``rank_hint.py``).
"""

from collections.abc import Mapping, Sequence
from numbers import Integral

from rrfp import _C
from rrfp.given_lists import drawn, is_ordered_list
from rrfp.schedule_csv import is_schedule, read_schedule
from rrfp.tasks import Task
from rrfp.value_text import nearest

NAMES = ("auto", "1f1b", "gpipe", "bf", "bfw", "fb", "b-priority", "f-priority", "zb-h1",
         "interleaved", "zbv")
_CHOICES = (f"one of {NAMES}, a list of the task texts of all ranks, {{rank: list of task texts}}, "
            "a schedule of torch's (a .csv file, or its text), or a callable rank(task, state)")
SPLIT_HINTS = ("bfw", "zb-h1", "zbv")  # rank W tasks, so backwards are split


def normalise_hint(hint, rank_of_stage=None):
    """(name, order) of a hint argument; order is a list of task texts, empty for a name.

    A callable stays as it is: it is asked when the step is decided.

    ``rank_of_stage`` is what an order by rank is checked against; None: not at all.

    Raises:
        ValueError: An unknown name, a text that is not a task, a task under another rank than
            its stage's, or a schedule file that cannot be read.
        TypeError: Neither a name nor task texts.
    """
    if is_schedule(hint):
        hint = read_schedule(hint)
    if isinstance(hint, str):
        if hint in NAMES:
            return hint, []
        raise ValueError(f"hint {hint!r} is not known.{nearest(hint, NAMES)} Pass {_CHOICES}.")
    if callable(hint):
        return hint, []
    if isinstance(hint, Mapping):
        hint = _lists_by_rank(hint)
        texts = [text for rank in hint for text in hint[rank]]
    elif isinstance(hint, Sequence):
        texts = drawn("hint", hint)
    else:
        raise TypeError(f"hint is {hint!r:.80}; pass {_CHOICES}.")
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
    if isinstance(hint, Mapping) and rank_of_stage is not None:
        _check_ranks(hint, rank_of_stage)
    return "order", texts


def _lists_by_rank(hint):
    """``{rank: list}``, by ascending rank."""
    for rank, texts in hint.items():
        if not isinstance(rank, Integral) or isinstance(rank, bool):
            raise TypeError(
                f"hint has {rank!r}, a {type(rank).__name__}, where an order by rank has a rank; "
                "pass {rank: list of task texts}."
            )
        if not is_ordered_list(texts):
            raise TypeError(
                f"hint has {texts!r:.80} for rank {rank}; list the rank's task texts, such as "
                "['0F0', '0B0'], or [] for none."
            )
    return {rank: drawn(f"hint[{rank}]", hint[rank]) for rank in sorted(hint)}


def _check_ranks(hint, rank_of_stage):
    """An order by rank lists each task under the rank that runs it."""
    for rank in hint:
        for text in hint[rank]:
            stage = _C.parse_task(str(text))[0]
            if stage < len(rank_of_stage) and rank_of_stage[stage] != rank:
                raise ValueError(
                    f"hint lists {text} for rank {rank}, but stage {stage} is on rank "
                    f"{rank_of_stage[stage]}; list it there, or change the placement."
                )


def slack_of(value):
    """A slack of the core's as a user passes it, with ``"unlimited"`` for None."""
    return {_C.UNLIMITED: "unlimited", _C.AUTO_SLACK: "auto"}.get(value, value)


def has_halves(order):
    """Whether an order of task texts lists input and weight gradients (I, W), not full backwards.

    An order of forwards alone lists neither, and counts as one of full backwards.
    """
    return any(_C.parse_task(text)[1] in "IW" for text in order)
