"""The arguments of a step, as one rank was given them.

``StepRequest`` checks what one rank can check alone and keeps its tables; ``view()`` is what it
tells the others. What all ranks together ask for is decided in ``agreement.py``.
"""

import hashlib
import math
from collections.abc import Mapping

import torch

from rrfp import _C
from rrfp.given_lists import microbatch_places, numbers
from rrfp.hints import SPLIT_HINTS, has_halves, normalise_hint, slack_of
from rrfp.limits import activation_table, in_flight_limit
from rrfp.stage import StageInputs
from rrfp.stage_tables import by_loss_stage, draw_inputs, draw_kwargs, draw_targets
from rrfp.value_text import nearest

_LONGEST_S = 1e9  # in milliseconds and nanoseconds it still fits the core's integers


def _is_int(value):
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value):
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def is_timeout(seconds):
    """Whether it is a number of seconds that can be waited for."""
    return _is_number(seconds) and 0 < seconds <= _LONGEST_S


def check_timeout(name, seconds):
    """Refuse what ``is_timeout`` does not take.

    Raises:
        TypeError: Not a number.
        ValueError: Not positive, or longer than 1e9 seconds.
    """
    if not is_timeout(seconds):
        kind = ValueError if _is_number(seconds) else TypeError
        raise kind(
            f"{name} is {seconds!r}; it must be a positive number of seconds, at most "
            f"{_LONGEST_S:g}."
        )


def _count(name, value, least):
    """An int of at least ``least``."""
    if not _is_int(value):
        raise TypeError(f"{name} is {value!r}, a {type(value).__name__}; it must be an int.")
    if not least <= value < 2**31:
        raise ValueError(f"{name} is {value}; it must be at least {least} and below 2**31.")
    return value


def _normalise_slack(slack):
    if slack is None:
        return _C.UNLIMITED
    if isinstance(slack, str) and slack == "auto":
        return _C.AUTO_SLACK
    if isinstance(slack, str):
        raise ValueError(
            f"slack is {slack!r}; use 'auto', None (unlimited) or an int."
            + nearest(slack, ("auto",))
        )
    return _count("slack", slack, 0)


def _normalise_reduction(loss_reduction):
    if isinstance(loss_reduction, str):
        if loss_reduction not in ("mean", "sum"):
            raise ValueError(
                f"loss_reduction is {loss_reduction!r}; use 'mean', 'sum' or one weight per "
                "microbatch." + nearest(loss_reduction, ("mean", "sum"))
            )
        return loss_reduction
    return numbers("loss_reduction", loss_reduction, -math.inf)


def _normalise_order(microbatch_order):
    """A name or a callable as it is, else a list: ranks compare what an iterator gives."""
    if isinstance(microbatch_order, str) or callable(microbatch_order):
        return microbatch_order
    return microbatch_places(microbatch_order)


def _normalise_scale(grad_scale):
    if grad_scale is None:
        return 1.0
    try:
        scale = float(grad_scale)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        raise TypeError(f"grad_scale is {grad_scale!r}; it must be a number.") from None
    if not math.isfinite(scale):
        raise ValueError(f"grad_scale is {scale}; it must be finite.")
    return scale


def check_state(state):
    """The step counter in what ``Pipeline.state_dict`` returned.

    Raises:
        TypeError, ValueError: It is no such dict.
    """
    if not isinstance(state, Mapping):
        raise TypeError(f"the state is a {type(state).__name__}; pass what state_dict() returned.")
    if set(state) != {"step"}:
        raise ValueError(f"the state has the keys {sorted(map(str, state))}; expected 'step'.")
    return _count("the step of the state", state["step"], 0)


def _normalise_seed(seed):
    if seed is None:
        return None
    if not _is_int(seed):
        raise TypeError(f"seed is {seed!r}, a {type(seed).__name__}; it must be an int or None.")
    if not -(2**63) <= seed < 2**64:
        raise ValueError(f"seed is {seed}; it must fit in 64 bits.")
    return int(seed)


def _flag(name, value):
    """What equals True or False, as a bool; "False" and others, which Python takes for true, are
    refused."""
    try:
        if value in (True, False):
            return bool(value)
    except Exception:  # an array or a tensor says that it is not one value
        pass
    raise TypeError(f"{name} is a {type(value).__name__}; use True or False.")


def _normalise_products(add_in_products, is_deterministic):
    if _flag("add_in_products", add_in_products) and is_deterministic:
        raise ValueError(
            "add_in_products rounds otherwise than a plain loop, whose bits deterministic "
            "promises; pass one of them."
        )
    return bool(add_in_products)


def _normalise_lookahead(lookahead):
    if not isinstance(lookahead, str) and not _is_int(lookahead):
        raise TypeError(
            f"lookahead is {lookahead!r}, a {type(lookahead).__name__}; use 'jit', 'eager' or 1."
        )
    if lookahead not in ("jit", "eager", 1):
        raise ValueError(
            f"lookahead is {lookahead!r}; use 'jit' (the next task is chosen just in time for the "
            "GPU to have it), 'eager' (as soon as the task before it runs) or 1 (when that one has "
            "ended)." + nearest(lookahead, ("jit", "eager"))
        )
    return lookahead


def _check_callable(loss_fns):
    for function in loss_fns:
        if not callable(function):
            raise TypeError(
                f"loss_fn is a {type(function).__name__}; it must be callable. It comes after the "
                "targets, or by name: loss_fn=."
            )


class StepRequest:
    """What one rank asks of a step: options for all, and the tables of its own stages."""

    def __init__(
        self,
        layout,
        own_stages,
        microbatches,
        targets,
        loss_fn,
        *,
        num_microbatches,
        stage_kwargs,
        hint,
        slack,
        max_in_flight,
        activation_bytes,
        split_backward,
        add_in_products,
        deterministic,
        seed,
        microbatch_order,
        costs,
        loss_reduction,
        grad_scale,
        return_outputs,
        broadcast_loss,
        forward_only,
        lookahead,
        stall_timeout_s,
        launch_note="",
    ):
        self.layout = layout
        self.launch_note = launch_note
        self.own_stages = own_stages
        if num_microbatches is not None:
            _count("num_microbatches", num_microbatches, 1)
        self.num_microbatches = num_microbatches
        self.hint, self.order = normalise_hint(hint, layout.rank_of_stage)
        self.slack = _normalise_slack(slack)
        self.in_flight = in_flight_limit(max_in_flight, layout, slack)
        self.activation_bytes = activation_table(activation_bytes, layout)
        self.deterministic = _flag("deterministic", deterministic)
        self.split_backward = self._normalise_split(split_backward)
        self.add_in_products = _normalise_products(add_in_products, self.deterministic)
        self.seed = _normalise_seed(seed)
        self.microbatch_order = _normalise_order(microbatch_order)
        self.costs = None if costs is None else numbers("costs", costs, 0)
        self.loss_reduction = _normalise_reduction(loss_reduction)
        self.grad_scale = _normalise_scale(grad_scale)
        self.return_outputs = _flag("return_outputs", return_outputs)
        self.broadcast_loss = _flag("broadcast_loss", broadcast_loss)
        self.forward_only = _flag("forward_only", forward_only)
        self.lookahead = _normalise_lookahead(lookahead)
        check_timeout("stall_timeout_s", stall_timeout_s)
        self.stall_timeout_s = stall_timeout_s
        self._loss_fns = by_loss_stage("loss_fn", loss_fn, layout, own_stages)
        _check_callable(self._loss_fns.values())
        self._check_training(targets)
        self.inputs = draw_inputs(microbatches, layout, own_stages, num_microbatches)
        self.targets = draw_targets(targets, layout, own_stages, num_microbatches)
        self.kwargs = draw_kwargs(stage_kwargs, layout, num_microbatches)
        for stage in self._loss_fns:
            if stage in own_stages and stage not in self.targets:
                raise ValueError(
                    f"targets is None on the rank of {self._name_of_loss_stage(stage)}, where "
                    "loss_fn(output, target) is called; pass one target per microbatch ([None] * "
                    "num_microbatches for a loss_fn that needs none)." + self.launch_note
                )

    @property
    def names_microbatches(self):
        """Whether the hint speaks of the microbatches as they were given."""
        return bool(self.order) or callable(self.hint)

    def hint_text(self, decision):
        """The hint and slack of a step, and what the guard had run in the place of "auto"."""
        if self.order:
            name = f"an order of {len(self.order)} tasks"
        else:
            name = "a callable" if callable(self.hint) else self.hint
        if self.hint == "auto" and decision.hint != "auto":
            return f"auto (guard: {decision.hint}, slack {slack_of(decision.slack)})"
        is_default = self.slack == _C.AUTO_SLACK
        return name if is_default else f"{name}, slack {slack_of(self.slack)}"

    def given_to(self, stage):
        """The tables of one stage of this rank."""
        return StageInputs(
            inputs=self.inputs.get(stage),
            targets=self.targets.get(stage),
            kwargs=self.kwargs.get(stage),
        )

    def view(self):
        """What the other ranks need to know, picklable and small."""
        lengths = {"costs": self.costs}
        for name, tables, stages in (
            ("microbatches", self.inputs, self.layout.source_stages),
            ("targets", self.targets, self.layout.loss_stages),
        ):
            only = len(stages) == 1
            lengths.update({name if only else f"{name}[{s}]": t for s, t in tables.items()})
        lengths.update({f"stage_kwargs[{s}]": items for s, items in self.kwargs.items()})
        lengths.update({f"activation_bytes[{s}]": sizes
                        for s, sizes in self.activation_bytes.items() if isinstance(sizes, list)})
        if not isinstance(self.loss_reduction, str):
            lengths["loss_reduction"] = self.loss_reduction
        lengths = {name: len(items) for name, items in lengths.items() if items is not None}
        if self.num_microbatches is not None:
            lengths["num_microbatches"] = self.num_microbatches
        order = self.microbatch_order
        if callable(order):
            order = f"callable {getattr(order, '__qualname__', type(order).__name__)}"
        digest = hashlib.sha256(" ".join(self.order).encode()).hexdigest()[:12]
        return {
            "lengths": lengths,
            "sources": sorted(self.inputs),
            "costs": self.costs,
            "activation_bytes": self.activation_bytes,
            "options": {
                "hint": f"order {digest} of {len(self.order)} tasks" if self.order
                        else "a callable" if callable(self.hint) else self.hint,
                "slack": slack_of(self.slack),
                "max_in_flight": self.in_flight.text(),
                "split_backward": self.split_backward,
                "add_in_products": self.add_in_products,
                "deterministic": self.deterministic,
                "seed": self.seed,
                "microbatch_order": order,
                "loss_reduction": self.loss_reduction,
                "grad_scale": self.grad_scale,
                "return_outputs": self.return_outputs,
                "broadcast_loss": self.broadcast_loss,
                "forward_only": self.forward_only,
            },
        }

    def _normalise_split(self, split_backward):
        """Whether backwards run as I and W; None: where the hint or ``deterministic`` needs it."""
        if split_backward is not None:
            split_backward = _flag("split_backward", split_backward)
        if self.order:
            names_halves = has_halves(self.order)
            if split_backward not in (None, names_halves):
                raise ValueError(
                    f"split_backward is {split_backward}, but the order given as hint lists "
                    f"{'I and W' if names_halves else 'B'} tasks; leave split_backward at None."
                )
            return names_halves
        if split_backward is None:
            return self.deterministic or self.hint in SPLIT_HINTS
        return split_backward

    def _check_training(self, targets):
        if callable(targets) and not hasattr(targets, "__iter__"):
            raise TypeError(
                f"targets is a {type(targets).__name__}, which looks like a loss_fn; that comes "
                "after targets, or by name: loss_fn=."
            )
        for stage in self.layout.loss_stages:
            if stage in self.own_stages and not (self.forward_only or stage in self._loss_fns):
                raise ValueError(
                    f"loss_fn is None on the rank of {self._name_of_loss_stage(stage)}; training "
                    "needs one. Pass loss_fn, or forward_only=True." + self.launch_note
                )
        if not self.forward_only and (
            not torch.is_grad_enabled() or torch.is_inference_mode_enabled()
        ):
            raise ValueError(
                "gradients are disabled here (torch.no_grad or inference_mode), so a loss cannot "
                "be trained. Leave that context, or pass forward_only=True."
            )

    def loss_fn_of(self, stage):
        """The stage's loss function; None: not a loss stage, or outputs alone are wanted."""
        return self._loss_fns.get(stage)

    def _name_of_loss_stage(self, stage):
        stages = self.layout.loss_stages
        return "the last stage" if stages == (self.layout.num_stages - 1,) else f"stage {stage}"
