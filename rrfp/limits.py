"""The in-flight limit: ``max_in_flight`` as units per rank."""

import re

_BY_NAME = re.compile(r"1f1b(?:\+(\d+))?$")
_CHOICES = "pass an int, a list of ints per rank, or '1f1b+2'"


def limits_per_rank(max_in_flight, layout):
    """Units per rank; empty for the hint's default.

    Raises:
        ValueError: A limit below 1, a list of the wrong length, or a name that is not known.
        TypeError: Neither an int, a list nor a name.
    """
    num_ranks = layout.num_ranks
    if max_in_flight is None:
        return ()
    if isinstance(max_in_flight, str):
        match = _BY_NAME.match(max_in_flight)
        if match is None:
            raise ValueError(
                f"max_in_flight is {max_in_flight!r}; limits in bytes are not supported yet, "
                f"{_CHOICES}."
            )
        extra = int(match.group(1) or 0)
        if not layout.has_one_stage_per_rank:
            raise ValueError(
                f"max_in_flight is {max_in_flight!r}, which counts one stage per rank, but there "
                f"are {layout.num_stages} stages on {num_ranks} ranks; pass an int or a list."
            )
        limits = [num_ranks - layout.stages_of(r)[0] + extra for r in range(num_ranks)]
    elif isinstance(max_in_flight, (list, tuple)):
        limits = max_in_flight
        if len(limits) != num_ranks:
            raise ValueError(
                f"max_in_flight lists {len(limits)} limits for {num_ranks} ranks; give one per "
                "rank."
            )
    else:
        limits = [max_in_flight] * num_ranks
    for rank, limit in enumerate(limits):
        if not isinstance(limit, int) or isinstance(limit, bool):
            raise TypeError(f"max_in_flight is {max_in_flight!r}; {_CHOICES}.")
        if not 1 <= limit < 2**31:
            raise ValueError(
                f"max_in_flight is {limit} for rank {rank}; it must be at least 1."
            )
    return tuple(limits)
