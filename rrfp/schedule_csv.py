"""torch's schedule files: one row per rank, one cell per action, as the order of a hint.

torch.distributed.pipelining writes and reads these with ``_dump_csv`` and ``_load_csv``. Its
compute actions are our task texts. Communication is left out, because the runtime moves what a
stage returns without being told; an empty cell is a moment in which the rank idles, which a hint
has no need of. A full backward among split ones becomes its two halves, one after the other.
"""

import os
import re

_COMPUTE = re.compile(r"(\d+)([FBIW])(\d+)")
_COMMUNICATION = re.compile(
    r"\d+(?:SEND_F|RECV_F|SEND_B|RECV_B)\d+|\d+(?:UNSHARD|RESHARD|REDUCE_GRAD)\d*"
)
_FUSED = re.compile(r"\(.*\)\w*|\w*OVERLAP\w*")


def is_schedule(hint):
    """Whether a hint is a schedule: a path, a text that ends in ``.csv``, or the rows' text."""
    if isinstance(hint, str):
        return hint.endswith(".csv") or "," in hint or "\n" in hint
    return isinstance(hint, os.PathLike)


def read_schedule(hint):
    """``{rank: [task texts]}`` of a schedule, given as a path or as its text.

    Raises:
        ValueError: The file cannot be read, or a cell is no action that can be ranked; names the
            row and the cell.
    """
    if isinstance(hint, str) and not hint.endswith(".csv"):
        rows = hint.splitlines()
    else:
        try:
            with open(hint, newline="", encoding="utf-8") as file:
                rows = file.read().splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(
                f"hint names the schedule file {os.fspath(hint)!r}, which cannot be read here: "
                f"{error}."
            ) from error
    while rows and not rows[-1].strip():
        rows.pop()
    order = {
        rank: [
            text
            for column, cell in enumerate(row.split(","))
            for text in _tasks(cell.strip(), f"row {rank}, cell {column}")
        ]
        for rank, row in enumerate(rows)
    }
    if any(_COMPUTE.fullmatch(t).group(2) in "IW" for texts in order.values() for t in texts):
        return {rank: [half for text in texts for half in _halves(text)]
                for rank, texts in order.items()}
    return order


def _tasks(cell, where):
    """The tasks of one cell: one, or none."""
    match = _COMPUTE.fullmatch(cell)
    if match is not None:
        stage, kind, microbatch = match.groups()
        return [f"{int(stage)}{kind}{int(microbatch)}"]
    if not cell or _COMMUNICATION.fullmatch(cell):
        return []
    if _FUSED.fullmatch(cell):
        raise ValueError(
            f"the schedule has the fused action {cell!r} in {where}; a task here is one forward "
            "or backward. Write the schedule without overlapped actions."
        )
    raise ValueError(
        f"the schedule has {cell!r} in {where}, which is no action such as '2F0', '2B0', '2I0' "
        "or '2W0'."
    )


def _halves(text):
    stage, kind, microbatch = _COMPUTE.fullmatch(text).groups()
    return [f"{stage}I{microbatch}", f"{stage}W{microbatch}"] if kind == "B" else [text]
