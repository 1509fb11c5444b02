"""The in-flight limit: ``max_in_flight`` as units or bytes per rank, and ``activation_bytes``."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rrfp.activations import MOST_BYTES

_BY_NAME = re.compile(r"1f1b(?:\+(\d+))?$")
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kKMGT]i?)?B$")
_POWER_OF = {"": 0, "k": 1, "K": 1, "M": 2, "G": 3, "T": 4}
_CHOICES = "pass an int, a size such as '24GiB', a list of these per rank, '1f1b' or '1f1b+2'"


@dataclass(frozen=True)
class InFlightLimit:
    """What a rank may hold between forward and backward.

    Attributes:
        units: Microbatches per rank, 0 for a rank that counts bytes; empty: the hint's default.
        num_bytes: Bytes per rank, None for one that counts units; empty: all count units.
    """

    units: tuple = ()
    num_bytes: tuple = ()

    def text(self):
        """For the other ranks, who must have the same."""
        if not self.num_bytes:
            return list(self.units) or "the default"
        return [units if size is None else f"{size} B"
                for units, size in zip(self.units, self.num_bytes)]

    def bytes_of(self, rank):
        """The rank's limit in bytes, None where it counts units."""
        return self.num_bytes[rank] if self.num_bytes else None


def size_in_bytes(text):
    """The bytes of a size such as ``"24GiB"``, ``"512 MB"`` or ``"1.5GB"``; None for other text."""
    match = _SIZE.match(text.strip())
    if match is None:
        return None
    number, prefix = match.group(1), match.group(2) or ""
    base = 1024 if prefix.endswith("i") else 1000
    size = float(number) * base ** _POWER_OF[prefix[:1]]
    return int(size) if math.isfinite(size) else None


def in_flight_limit(max_in_flight, layout, slack):
    """``max_in_flight`` per rank. ``slack`` is the caller's: 0 cannot keep a limit in bytes.

    Raises:
        ValueError: A limit below 1, a list of the wrong length, or a text that is no limit.
        TypeError: Neither an int, a text nor a list of them.
    """
    num_ranks = layout.num_ranks
    if max_in_flight is None:
        return InFlightLimit()
    if isinstance(max_in_flight, str) and _BY_NAME.match(max_in_flight):
        return InFlightLimit(_units_by_name(max_in_flight, layout))
    limits = max_in_flight
    if not isinstance(max_in_flight, (list, tuple)):
        limits = [max_in_flight] * num_ranks
    if len(limits) != num_ranks:
        raise ValueError(
            f"max_in_flight lists {len(limits)} limits for {num_ranks} ranks; give one per "
            "rank."
        )
    units, sizes = [], []
    for rank, limit in enumerate(limits):
        size = size_in_bytes(limit) if isinstance(limit, str) else None
        if isinstance(limit, str) and size is None:
            raise ValueError(f"max_in_flight is {max_in_flight!r}; {_CHOICES}.")
        if size is None and (not isinstance(limit, int) or isinstance(limit, bool)):
            raise TypeError(f"max_in_flight is {max_in_flight!r}; {_CHOICES}.")
        is_list = limits is max_in_flight
        _check_range(f"max_in_flight[{rank}]" if is_list else "max_in_flight", limit, size)
        units.append(limit if size is None else 0)
        sizes.append(size)
    if all(size is None for size in sizes):
        return InFlightLimit(tuple(units))
    if slack == 0 and not isinstance(slack, bool):
        raise ValueError(
            f"max_in_flight is {max_in_flight!r}, but with slack 0 no forward can be held back; "
            "give the limit in microbatches, or allow slack."
        )
    return InFlightLimit(tuple(units), tuple(sizes))


def _check_range(name, limit, size):
    """Refuse a limit that was given as ``limit``; ``size``: in bytes, None for microbatches."""
    value = limit if size is None else size
    if value < 1:
        least = "1 microbatch" if size is None else "1 byte"
        raise ValueError(
            f"{name} is {limit}; it must be at least {least}. For the default leave max_in_flight "
            "at None."
        )
    if value >= (1 << 31 if size is None else 1 << 62):
        most = "2**31 microbatches" if size is None else "2**62 bytes"
        raise ValueError(f"{name} is {limit}; it must be below {most}.")


def _units_by_name(name, layout):
    extra = int(_BY_NAME.match(name).group(1) or 0)
    if not layout.has_one_stage_per_rank:
        raise ValueError(
            f"max_in_flight is {name!r}, which counts one stage per rank, but there "
            f"are {layout.num_stages} stages on {layout.num_ranks} ranks; pass an int or a list."
        )
    units = [layout.num_ranks - layout.stages_of(r)[0] + extra for r in range(layout.num_ranks)]
    if max(units) >= 1 << 31:
        raise ValueError(f"max_in_flight is {name!r}; that is more than 2**31 - 1.")
    return tuple(units)


def activation_table(activation_bytes, layout):
    """``{stage: bytes, or a list of bytes per microbatch}`` of the stages that were given.

    Raises:
        ValueError: A stage that does not exist, a text that is no size, or a number out of range.
        TypeError: Something else.
    """
    if activation_bytes is None:
        return {}
    if not isinstance(activation_bytes, Mapping):
        size = _activation("activation_bytes", activation_bytes)
        return dict.fromkeys(range(layout.num_stages), size)
    table = {}
    for stage, given in activation_bytes.items():
        if stage not in range(layout.num_stages):
            raise ValueError(
                f"activation_bytes names stage {stage!r}; the stages are 0 to "
                f"{layout.num_stages - 1}."
            )
        name = f"activation_bytes[{stage}]"
        if isinstance(given, Sequence) and not isinstance(given, (str, bytes)):
            table[stage] = [_activation(f"{name}[{m}]", size) for m, size in enumerate(given)]
        else:
            table[stage] = _activation(name, given)
    return table


def _activation(name, size):
    number = size_in_bytes(size) if isinstance(size, str) else size
    if isinstance(size, str) and number is None:
        raise ValueError(f"{name} is {size!r}; pass bytes as an int, or a size such as '2GiB'.")
    if not isinstance(number, int) or isinstance(number, bool):
        raise TypeError(
            f"{name} is {size!r}; pass bytes for every stage, or {{stage: bytes, or one number "
            "per microbatch}}."
        )
    if not 0 <= number <= MOST_BYTES:
        raise ValueError(f"{name} is {number}; it must be from 0 to 2**46 bytes.")
    return number
