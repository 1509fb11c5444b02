"""What a step cost, and what it returned."""

from dataclasses import dataclass, field
from itertools import repeat
from typing import NamedTuple

import torch

# From this share of the wall time on the report has a sentence on inputs in transfer.
_TOLD_TRANSFER_SHARE = 0.05


class TaskRecord(NamedTuple):
    """A task as it was run. Times are of one monotonic clock per host.

    Attributes:
        task: Its text, such as ``"2F0"``.
        overtaken: How many unfinished tasks stood before it in the hint.
    """

    task: str
    ready_ns: int
    claimed_ns: int
    retired_ns: int
    overtaken: int


@dataclass(frozen=True)
class RankReport:
    """Where the wall time of one rank went; compute, idle and host add up to it.

    Attributes:
        compute_s: Inside stage functions (and rrfp's handing over of their results). Where ranks
            are threads of one process, also a task's waiting for Python's lock or for its turn.
        idle_warmup_s: Before the first task of the rank: its inputs were not computed yet. The
            pipeline fills.
        idle_input_s: Later: nothing had all its inputs, and what ran next lacked one that was not
            computed yet. Draining counts here: the step of a rank is over with its last task.
        idle_transfer_s: Nothing had all its inputs, and those of what ran next were all computed:
            the last of them was on its way from another rank. Where it is not known when an
            input was computed, no waiting for it counts here. In one process nothing travels: the
            thread was woken late, or its core was busy.
        transfer_from_s: ``{rank: seconds}``, ``idle_transfer_s`` by the rank that it was on its
            way from.
        idle_limit_s: The in-flight limit held a ready forward back.
        idle_slack_s: The hint put a task first that was not ready.
        idle_agreement_s: A task was ready here, but not at every member of the agreement group.
        host_s: Between a task's end and the next choice: rrfp itself.
        peak_units: Most forwards in flight at once, one for each stage and microbatch, of
            ``limit_units`` allowed; that is -1 where the limit is in bytes, and in a step of
            forwards alone.
        records: A ``TaskRecord`` per task, in the order run.
        order: The tasks' texts in that order, such as ``["0F0", "0F1", "0B0", ...]``.
        num_tasks, skips: How many ran; how many of them although the hint put others, not yet
            run, before them.
        idle_s: The sum of the idle parts.
        peak_bytes: Most bytes of activations held at once, as measured, where ``limit_bytes`` was
            asked for; else None.
    """

    rank: int
    wall_s: float
    compute_s: float
    idle_warmup_s: float
    idle_input_s: float
    idle_transfer_s: float
    idle_limit_s: float
    idle_slack_s: float
    idle_agreement_s: float
    host_s: float
    peak_units: int
    limit_units: int
    records: tuple = field(repr=False)
    peak_bytes: int | None = None
    limit_bytes: int | None = None
    transfer_from_s: dict = field(default_factory=dict)

    @property
    def overshoot_bytes(self):
        """By how much ``peak_bytes`` was above the limit; 0 where no bytes were asked for."""
        return 0 if self.peak_bytes is None else max(0, self.peak_bytes - self.limit_bytes)

    @property
    def num_tasks(self):
        return len(self.records)

    @property
    def idle_s(self):
        return (self.idle_warmup_s + self.idle_input_s + self.idle_transfer_s + self.idle_limit_s
                + self.idle_slack_s + self.idle_agreement_s)

    @property
    def skips(self):
        """How many tasks ran although the hint put others, not yet run, before them."""
        return sum(1 for record in self.records if record.overtaken)

    @property
    def order(self):
        """Task texts in the order run."""
        return [record.task for record in self.records]


@dataclass(frozen=True)
class StepReport:
    """The ranks of this process in one step; ``str()`` is a table.

    Attributes:
        ranks: A ``RankReport`` each.
        fused: ``{stage: reason}`` of the stages whose backward was to be split and could not be:
            I was the whole backward, W did nothing.
        hint: What ranked the tasks, such as ``"auto"`` or ``"1f1b, slack 2"`` (a slack only where
            one was given); ``"auto (guard: 1f1b, slack 2)"`` where the guard of ``"auto"`` had
            another order run.
    """

    ranks: tuple
    fused: dict = field(default_factory=dict)
    hint: str = "auto"

    def __str__(self):
        head = ("rank", "wall ms", "compute", "warm-up", "input", "transfer", "limit", "slack",
                "agreement", "host", "tasks", "skips", "peak units")
        rows = [head]
        for r in self.ranks:
            parts = (r.compute_s, r.idle_warmup_s, r.idle_input_s, r.idle_transfer_s,
                     r.idle_limit_s, r.idle_slack_s, r.idle_agreement_s, r.host_s)
            share = [f"{100 * part / r.wall_s if r.wall_s else 0:.1f} %" for part in parts]
            rows.append((str(r.rank), f"{1000 * r.wall_s:.2f}", *share, str(r.num_tasks),
                         str(r.skips), units_text(r.peak_units, r.limit_units)))
        widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
        lines = ["  ".join(c.rjust(w) for c, w in zip(row, widths)) for row in rows]
        lines.append(f"hint {self.hint}")
        for r in self.ranks:
            if r.idle_transfer_s > _TOLD_TRANSFER_SHARE * r.wall_s:
                lines.append(_transfer_text(r))
            if r.peak_bytes is not None:
                lines.append(
                    f"rank {r.rank} held {size_text(r.peak_bytes)} of activations at most, its "
                    f"limit is {size_text(r.limit_bytes)}"
                )
        for stage, reason in self.fused.items():
            lines.append(f"stage {stage} is fused: {reason}")
        return "\n".join(lines)


def _transfer_text(r):
    sources = sorted(r.transfer_from_s.items(), key=lambda item: -item[1])
    each = ", ".join(f"{1000 * seconds:.2f} ms from rank {source}" for source, seconds in sources)
    return (f"rank {r.rank} was idle for {1000 * r.idle_transfer_s:.2f} ms "
            f"({100 * r.idle_transfer_s / r.wall_s:.1f} % of its wall time) while its next input "
            f"was computed and in transfer: {each}")


@dataclass
class StepResult:
    """What a step returned; lists are in the caller's order of microbatches.

    With several loss stages, ``{stage: list}`` of those of this process in the place of a list.

    Attributes:
        losses: Detached losses before weights and scale, on the rank of the loss stage; None
            elsewhere unless ``broadcast_loss``.
        metrics: What ``loss_fn`` returned beside the loss, likewise; None if it did not.
        outputs: The last stage's outputs, with ``return_outputs``; else None.
        report: A ``StepReport``.
    """

    losses: list | dict | None
    metrics: list | dict | None
    outputs: list | dict | None
    report: StepReport


def units_text(peak, limit):
    """Such as ``3 of 4``; the peak alone where no units are counted (limit -1)."""
    return str(peak) if limit < 0 else f"{peak} of {limit}"


def size_text(num_bytes):
    """Such as 1.50 GiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024 or unit == "GiB":
            return f"{num_bytes} B" if unit == "B" else f"{num_bytes:.2f} {unit}"
        num_bytes /= 1024


def rank_report(rank_step, limit_bytes=None):
    """The report of a RankStep that has run."""
    times, runtime = rank_step.times, rank_step.runtime
    return RankReport(
        rank=runtime.rank,
        wall_s=times.wall_ns / 1e9,
        compute_s=times.compute_ns / 1e9,
        idle_warmup_s=times.idle_warmup_ns / 1e9,
        idle_input_s=times.idle_input_ns / 1e9,
        idle_transfer_s=times.idle_transfer_ns / 1e9,
        idle_limit_s=times.idle_limit_ns / 1e9,
        idle_slack_s=times.idle_slack_ns / 1e9,
        idle_agreement_s=times.idle_agreement_ns / 1e9,
        host_s=times.host_ns / 1e9,
        peak_units=runtime.peak_units,
        limit_units=rank_step.plan.limit_units(runtime.rank),
        records=tuple(map(tuple.__new__, repeat(TaskRecord), rank_step.records)),
        peak_bytes=None if rank_step.held_bytes is None else rank_step.held_bytes.peak,
        limit_bytes=limit_bytes,
        transfer_from_s={source: ns / 1e9 for source, ns in enumerate(times.transfer_from_ns)
                         if ns > 0},
    )


def step_result(rank_steps, layout, request, decision):
    """What a step of some RankSteps returned to the caller of its request."""
    stage_steps = {s: step for rank_step in rank_steps for s, step in rank_step.stage_steps.items()}
    fused = {s: t.fused_because for s, t in stage_steps.items() if t.fused_because is not None}
    limit = request.in_flight
    report = StepReport(
        tuple(rank_report(step, limit.bytes_of(step.runtime.rank)) for step in rank_steps), fused,
        request.hint_text(decision),
    )
    here = {stage: stage_steps[stage] for stage in layout.loss_stages if stage in stage_steps}
    with_metrics = {s: t.metrics for s, t in here.items() if any(m is not None for m in t.metrics)}
    with_loss = {s: t.losses for s, t in here.items() if request.loss_fn_of(s) is not None}
    outputs = {s: t.outputs for s, t in here.items()} if request.return_outputs else {}
    return StepResult(
        losses=of_loss_stages(with_loss, layout),
        metrics=of_loss_stages(with_metrics, layout),
        outputs=of_loss_stages(outputs, layout),
        report=report,
    )


def of_loss_stages(tables, layout):
    """A result's list of the one loss stage, ``{stage: list}`` of several, or None."""
    if not tables:
        return None
    return tables if len(layout.loss_stages) > 1 else next(iter(tables.values()))


def plain_losses(tables):
    """The losses of each stage for another process: their dtypes, shapes and values."""
    return {
        stage: [(str(x.dtype).removeprefix("torch."), tuple(x.shape), x.item()) for x in table]
        for stage, table in tables.items()
    }


def losses_of_plain(table):
    """The losses of one stage, out of what ``plain_losses`` made of them."""
    return [torch.full(shape, value, dtype=getattr(torch, dtype)) for dtype, shape, value in table]
