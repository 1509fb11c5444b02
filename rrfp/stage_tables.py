"""The tables that a caller gives to stages: one item per microbatch.

They are drawn in full before anything runs, so that a wrong one is refused and nothing is lost.
"""

from collections.abc import Mapping, Sequence
from itertools import islice

import torch

from rrfp.boundary import flatten


def draw(name, items, num_microbatches):
    """The items per microbatch as a list; an iterator is drawn in full.

    Raises:
        TypeError: Neither a sequence nor iterable; or iterable, without num_microbatches.
        ValueError: An iterator without num_microbatches, or one that ends early.
    """
    if items is None:
        return None
    if isinstance(items, torch.Tensor):
        raise TypeError(
            f"{name} is one tensor of shape {tuple(items.shape)}; pass a sequence with one item "
            f"per microbatch, for example tensor.chunk(num_microbatches)."
        )
    if isinstance(items, Sequence) and not isinstance(items, (str, bytes)):
        return list(items)
    if isinstance(items, (str, bytes, Mapping)) or not hasattr(items, "__iter__"):
        raise TypeError(
            f"{name} is a {type(items).__name__}; pass a sequence with one item per microbatch, "
            "or an iterator and num_microbatches."
        )
    if num_microbatches is None and hasattr(items, "__next__"):
        raise ValueError(f"{name} is an iterator, so num_microbatches must be given.")
    if num_microbatches is None:
        raise TypeError(
            f"{name} is a {type(items).__name__}, which is no sequence; pass a list of this step's "
            "microbatches, or one iterator for all steps, iter(...) of it, and num_microbatches."
        )
    drawn = list(islice(iter(items), num_microbatches))
    if len(drawn) < num_microbatches:
        raise ValueError(
            f"the iterator {name} ended after {len(drawn)} of {num_microbatches} microbatches. "
            "Nothing was run; give it more items or lower num_microbatches."
        )
    return drawn


def _check_input(index, value):
    """A user's input without gradients of its own."""
    for tensor in flatten(value)[1]:
        if not isinstance(tensor, torch.Tensor):
            continue
        if tensor.requires_grad:
            raise ValueError(
                f"microbatch {index} holds a tensor that requires grad, but no gradient flows out "
                "of the first stage. Call .detach() on it, or make it a parameter of the stage."
            )
    return value


def by_loss_stage(name, value, layout, own_stages):
    """``{stage: value}`` of what was given for all loss stages, or as such a dict."""
    if value is None:
        return {}
    stages = layout.loss_stages
    if not isinstance(value, Mapping):
        if name == "loss_fn" or len(stages) == 1:
            return dict.fromkeys(stages, value)
        return {stage: value for stage in stages if stage in own_stages}
    _check_stages(name, value, stages, "loss stages")
    return {stage: item for stage, item in value.items() if item is not None}


def draw_inputs(microbatches, layout, own_stages, num_microbatches):
    """``{source stage: list}``; empty on a rank that was given nothing."""
    stages = layout.source_stages
    if isinstance(microbatches, Mapping):
        _check_stages("microbatches", microbatches, stages, "source stages")
        tables = {stage: items for stage, items in microbatches.items() if items is not None}
    elif microbatches is None:
        return {}
    else:
        own = [stage for stage in stages if stage in own_stages] or stages[:1]
        items = draw("microbatches", microbatches, num_microbatches)
        tables = dict.fromkeys(own, items)
    drawn = {}
    for stage, items in tables.items():
        items = draw("microbatches", items, num_microbatches)
        if not items:
            raise ValueError("microbatches is empty; a step needs at least one.")
        drawn[stage] = [_check_input(index, value) for index, value in enumerate(items)]
    return drawn


def draw_targets(targets, layout, own_stages, num_microbatches):
    """``{loss stage: list}``; one iterator that is given for several stages is drawn once."""
    tables, drawn = {}, {}
    for stage, items in by_loss_stage("targets", targets, layout, own_stages).items():
        if id(items) not in drawn:
            drawn[id(items)] = draw("targets", items, num_microbatches)
        tables[stage] = drawn[id(items)]
    return tables


def draw_kwargs(stage_kwargs, layout, num_microbatches):
    """``{stage: list of dict}``."""
    if stage_kwargs is None:
        return {}
    if not isinstance(stage_kwargs, Mapping):
        raise TypeError(
            f"stage_kwargs is a {type(stage_kwargs).__name__}; pass {{stage_index: sequence "
            "of dict}."
        )
    drawn = {}
    for stage, items in stage_kwargs.items():
        if stage not in range(layout.num_stages):
            raise ValueError(
                f"stage_kwargs names stage {stage!r}; the stages are 0 to "
                f"{layout.num_stages - 1}."
            )
        items = draw(f"stage_kwargs[{stage}]", items, num_microbatches)
        for index, item in enumerate(items or ()):
            if not isinstance(item, Mapping):
                raise TypeError(
                    f"stage_kwargs[{stage}][{index}] is a {type(item).__name__}; it must be a "
                    "dict of keyword arguments."
                )
        if items is not None:
            drawn[stage] = items
    return drawn


def _check_stages(name, table, stages, what):
    for stage in table:
        if stage not in stages:
            raise ValueError(
                f"{name} is given for stage {stage!r}; the {what} are "
                f"{', '.join(map(str, stages))}."
            )
