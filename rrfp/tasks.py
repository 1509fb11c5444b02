"""Tasks by name: ``"2F0"`` is stage 2, forward, microbatch 0."""

import enum
from typing import NamedTuple

from rrfp import _C


class TaskKind(str, enum.Enum):
    """The letter of a task text."""

    FORWARD = "F"
    BACKWARD = "B"
    INPUT_GRAD = "I"
    WEIGHT_GRAD = "W"


class Task(NamedTuple):
    """A unit of work; ``str()`` is its text."""

    stage: int
    kind: TaskKind
    microbatch: int

    def __str__(self):
        return f"{self.stage}{self.kind.value}{self.microbatch}"


def parse_task(text):
    """Read a task text such as ``"2F0"``.

    Raises:
        ValueError: The text is not exactly stage, kind letter and microbatch.
    """
    stage, letter, microbatch = _C.parse_task(text)
    return Task(stage, TaskKind(letter), microbatch)
