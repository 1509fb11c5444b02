"""Lists that a caller gives: what is one, and those of numbers and of microbatches."""

import itertools
import math
import operator
from collections.abc import Mapping, Set

import torch

from rrfp.value_text import repr_text, value_text

# Of any list that a step or a pipeline takes; an iterator that gives more has no end.
_MOST_ITEMS = 1 << 20


def drawn(name, values):
    """What is in a list or an iterator, as a list.

    Raises:
        ValueError: It has no end.
    """
    items = list(itertools.islice(values, _MOST_ITEMS + 1))
    if len(items) > _MOST_ITEMS:
        raise ValueError(
            f"{name} gives more than {_MOST_ITEMS:,} items, as an iterator without an end does; "
            "pass a list."
        )
    return items


def is_list(value):
    """Whether it can be gone through for its items: no text, no dict, nothing of one value alone,
    such as a tensor without dimensions."""
    if isinstance(value, (str, bytes, Mapping)) or not hasattr(value, "__iter__"):
        return False
    try:
        iter(value)
    except TypeError:
        return False
    return True


def is_ordered_list(value):
    """Whether it is a list whose items have places: no set."""
    return is_list(value) and not isinstance(value, Set)


def _values(name, tensor):
    """A tensor's values as a list; one on device meta, a fake or a wrapped one may have none."""
    try:
        return tensor.tolist()
    except Exception as error:
        raise TypeError(
            f"{name} is {value_text(tensor)}, on device {tensor.device}, whose values cannot be "
            f"read ({type(error).__name__}); pass a list, or a tensor that holds values."
        ) from None


def numbers(name, values, least):
    """One finite number per microbatch as a list of floats.

    Raises:
        TypeError: Not a sequence, or an item that is no number.
        ValueError: A number that is not finite, or below ``least``.
    """
    if isinstance(values, torch.Tensor):
        values = _values(name, values)
    if not is_ordered_list(values):
        raise TypeError(
            f"{name} is {repr_text(values)}; pass a sequence with one number per microbatch, in "
            "their order."
        )
    found = []
    for index, value in enumerate(drawn(name, values)):
        try:
            number = float(value)
        except Exception:  # a tensor without values, say, has errors of its own
            raise TypeError(
                f"{name}[{index}] is {repr_text(value)}; it must be a number."
            ) from None
        if not math.isfinite(number) or number < least:
            raise ValueError(
                f"{name}[{index}] is {number}; it must be finite"
                + (f" and at least {least}." if least == 0 else ".")
            )
        found.append(number)
    return found


def microbatch_places(order):
    """A microbatch order that is neither a name nor a callable, as a list of ints.

    Raises:
        TypeError: Something else, or an item that is no int.
    """
    if isinstance(order, torch.Tensor):
        order = _values("microbatch_order", order)
    if is_ordered_list(order):
        order = drawn("microbatch_order", order)
        try:
            return [operator.index(m) for m in order]
        except Exception:  # a tensor without values has errors of its own
            pass
    raise TypeError(
        f"microbatch_order is {repr_text(order)}; use 'given', 'mid', a list or a callable."
    )
