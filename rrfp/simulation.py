"""A step in virtual time, decided by the same code that decides real ones."""

from collections.abc import Mapping
from dataclasses import dataclass

from rrfp import _C
from rrfp.agreement import decide
from rrfp.arguments import StepRequest
from rrfp.layout import make_layout
from rrfp.report import units_text

_NS = 1_000_000_000


@dataclass(frozen=True)
class SimulatedTask:
    """A task with its start and end in seconds."""

    task: str
    start_s: float
    end_s: float


@dataclass(frozen=True)
class SimulatedStep:
    """What ``simulate`` found.

    Attributes:
        makespan_s: From the first start to the last end.
        ranks: Per rank, its tasks in the order run.
        peak_units: Per rank, the most microbatches in flight at once.
        limit_units: Per rank, how many were allowed; -1: any number, or a limit in bytes.
        overtakes: Tasks that ran before one that the hint puts first.
    """

    makespan_s: float
    ranks: tuple
    peak_units: tuple
    limit_units: tuple
    overtakes: int

    def order(self, rank):
        """Task texts of a rank in the order run."""
        return [task.task for task in self.ranks[rank]]

    def busy_s(self, rank):
        """Seconds that a rank spends inside tasks."""
        return sum(task.end_s - task.start_s for task in self.ranks[rank])

    def __str__(self):
        """A table: a row per rank, then the makespan."""
        rows = [("rank", "first start", "last end", "busy", "peak units")]
        for rank, tasks in enumerate(self.ranks):
            share = self.busy_s(rank) / self.makespan_s if self.makespan_s else 1.0
            rows.append((str(rank), f"{tasks[0].start_s:g} s", f"{tasks[-1].end_s:g} s",
                         f"{100 * share:.1f} %",
                         units_text(self.peak_units[rank], self.limit_units[rank])))
        widths = [max(map(len, column)) for column in zip(*rows)]
        lines = ["  ".join(c.rjust(w) for c, w in zip(row, widths)) for row in rows]
        return "\n".join([*lines, f"makespan {self.makespan_s:g} s, {self.overtakes} overtakes"])


def simulate(
    durations,
    *,
    num_stages,
    num_microbatches,
    latency=0.0,
    hint="auto",
    slack="auto",
    max_in_flight=None,
    activation_bytes=None,
    split_backward=None,
    microbatch_order="given",
    costs=None,
    forward_only=False,
    fifo_links=False,
):
    """Simulate one step with given durations, one stage per rank.

    It is the step that the hint gives: the guard, which learns from real steps, has no say, and
    no time is taken by hosts.

    Args:
        durations: Seconds per task: ``{(kind, stage, microbatch): seconds}`` with kind ``"F"``
            or ``"B"`` (split: ``"F"``, ``"I"``, ``"W"``), or a callable of these three.
        num_stages: Stages of the chain, one per rank.
        num_microbatches: Microbatches of the step.
        latency: Seconds between a task's end and the arrival of its result: a number, or a
            callable of the finished task's kind, stage and microbatch.
        hint, slack, max_in_flight, activation_bytes, split_backward, microbatch_order, costs,
            forward_only: As in ``run_pipeline``; a limit in bytes needs ``activation_bytes`` of
            the rank's stage, for nothing is measured here.
        fifo_links: Messages between two ranks arrive in the order sent.

    Returns:
        ``SimulatedStep``.

    Raises:
        ValueError: A duration that is missing or negative, a limit in bytes without
            ``activation_bytes``, or other arguments that cannot be run.

    Example:
        >>> import rrfp
        >>> step = rrfp.simulate(lambda kind, stage, m: 1.0 if kind == "F" else 2.0,
        ...                      num_stages=4, num_microbatches=8, hint="1f1b", slack=0)
        >>> step.makespan_s
        33.0
        >>> print(step)
        rank  first start  last end    busy  peak units
           0          0 s      33 s  72.7 %      4 of 4
           1          1 s      31 s  72.7 %      3 of 3
           2          2 s      29 s  72.7 %      2 of 2
           3          3 s      27 s  72.7 %      1 of 1
        makespan 33 s, 0 overtakes
    """
    layout = make_layout(num_stages, None, "loop")
    request = StepRequest(
        layout,
        set(),
        [None] * num_microbatches,
        None,
        None,
        num_microbatches=num_microbatches,
        stage_kwargs=None,
        hint=hint,
        slack=slack,
        max_in_flight=max_in_flight,
        activation_bytes=activation_bytes,
        split_backward=split_backward,
        add_in_products=False,
        deterministic=False,
        seed=0,
        microbatch_order=microbatch_order,
        costs=costs,
        loss_reduction="sum",
        grad_scale=None,
        return_outputs=False,
        broadcast_loss=False,
        forward_only=forward_only,
        lookahead="jit",
        stall_timeout_s=1.0,
    )
    _check_sizes(request)
    view = {**request.view(), "counter": 0, "traits": {}, "held": {}, "moved": ()}
    plan = decide(request, [view], layout).plan(layout)
    kinds = "FIW" if request.split_backward else "FB"
    used = "F" if forward_only else kinds
    # A weight gradient is sent nowhere.
    sent = used.replace("W", "")
    result = _C.simulate(
        plan,
        _table("durations", _lookup(durations), kinds, used, num_stages, num_microbatches),
        _table("latency", _latency(latency), kinds, sent, num_stages, num_microbatches),
        fifo_links,
    )
    if not result.finished:
        raise AssertionError("a simulated step did not finish; this is a bug in rrfp")
    return SimulatedStep(
        makespan_s=result.makespan_ns / _NS,
        ranks=tuple(
            tuple(SimulatedTask(text, start / _NS, end / _NS) for text, start, end in tasks)
            for tasks in result.ranks
        ),
        peak_units=tuple(result.peak_units),
        limit_units=tuple(plan.limit_units(rank) for rank in range(layout.num_ranks)),
        overtakes=result.overtakes,
    )


def _check_sizes(request):
    """Refuse a limit in bytes for a stage of unknown size; ranks are stages here."""
    if request.forward_only:  # nothing is held until a backward
        return
    stages = [stage for stage, limit in enumerate(request.in_flight.num_bytes)
              if limit is not None and stage not in request.activation_bytes]
    if stages:
        names = f"stage{'s' * (len(stages) > 1)} {', '.join(map(str, stages))}"
        raise ValueError(
            f"max_in_flight is in bytes, but the size of {names} is not known, and a simulated "
            "step measures nothing; pass activation_bytes (one size for all stages, or {stage: "
            "size, or one per microbatch}), or the limit in microbatches."
        )


def _lookup(durations):
    if callable(durations):
        return durations
    if not isinstance(durations, Mapping):
        raise TypeError(
            f"durations is a {type(durations).__name__}; pass {{(kind, stage, microbatch): "
            "seconds} or a callable."
        )

    def look_up(kind, stage, microbatch):
        try:
            return durations[kind, stage, microbatch]
        except KeyError:
            raise ValueError(f"durations has no entry for {kind, stage, microbatch}.") from None

    return look_up


def _latency(latency):
    return latency if callable(latency) else lambda kind, stage, microbatch: latency


def _is_duration(seconds):
    try:
        return bool(0 <= seconds < 1e9)
    except TypeError:  # None, say, or a text
        return False


def _table(name, seconds_of, kinds, used, num_stages, num_microbatches):
    """Nanoseconds by kind, stage and microbatch, in one list; 0 for kinds that are not used."""
    table = []
    for kind in kinds:
        for stage in range(num_stages):
            for microbatch in range(num_microbatches):
                seconds = seconds_of(kind, stage, microbatch) if kind in used else 0.0
                if not _is_duration(seconds):
                    raise ValueError(
                        f"{name} of {stage}{kind}{microbatch} is {seconds!r}; it must be a number "
                        "of seconds, at least 0."
                    )
                table.append(round(float(seconds) * _NS))
    return table
