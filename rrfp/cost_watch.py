"""Warnings for what costs a user time or memory without being wrong, few and far between.

On the CPU the host sees how long tasks take. On GPUs a task's record ends when it is launched: it
cannot tell what the device waited for, but whether the host did anything else than launch.
"""

import logging
from statistics import median

from rrfp.report import size_text

logger = logging.getLogger("rrfp")

# A warning speaks of so many steps on end, and comes again, of whatever rank, after so many.
_NUM_STEPS = 40
_QUIET_STEPS = 1000
# Of the wall time: more than this between tasks, or held back by the limit beyond what a pipeline
# that fills and drains must wait anyway.
_HOST_SHARE = 0.10
_LIMIT_SHARE = 0.15
# Of the wall time on GPUs: a host that launches for longer is hardly ever ahead of its device.
_LAUNCH_SHARE = 0.85
# Tasks below this are not worth what handing over their results costs.
_SHORT_TASK_S = 100e-6


class CostWatch:
    """Looks at the reports of one session, step after step."""

    def __init__(self, on_gpus):
        self._on_gpus = on_gpus
        self._found = {}  # (rank, what) -> values of the last steps on end
        self._quiet_until = {}  # what -> step
        self._step = 0

    def look(self, report, forward_only):
        """Take in the report of a step, and warn where it is time to."""
        self._step += 1
        for rank in report.ranks:
            counted_bytes = rank.limit_units < 0  # the first step counts microbatches
            if rank.overshoot_bytes and counted_bytes:
                self._warn(
                    "bytes",
                    "rank %d held %s of activations, above its limit of %s: a microbatch was "
                    "larger than foretold or does not fit; give activation_bytes, or smaller "
                    "microbatches", rank.rank, size_text(rank.peak_bytes),
                    size_text(rank.limit_bytes),
                )
            if forward_only or not rank.num_tasks or not rank.wall_s:
                continue
            if self._on_gpus:
                self._look_at_launches(rank)
            elif not self._look_at_host(rank):
                self._look_at_limit(rank)

    def _look_at_launches(self, rank):
        share = (rank.compute_s + rank.host_s) / rank.wall_s
        share = self._persists(rank.rank, "host", share if share > _LAUNCH_SHARE else None)
        if share is not None:
            self._warn(
                "host",
                "the host of rank %d is inside its stage functions for %.0f %% of a step: unless "
                "they wait for the GPU there (.item(), .cpu()), launching takes longer than "
                "computing. Larger microbatches, fewer stages, or torch.compile in the stages "
                "would help", rank.rank, 100 * share,
            )

    def _look_at_host(self, rank):
        """Whether the host bounds this step, so that it says nothing of others."""
        mean_s = rank.compute_s / rank.num_tasks
        share = rank.host_s / rank.wall_s
        is_bound = share > _HOST_SHARE or mean_s < _SHORT_TASK_S
        typical_s = self._persists(rank.rank, "host", mean_s if is_bound else None)
        if typical_s is not None:
            self._warn(
                "host",
                "rank %d is bound by the host: its tasks take %.0f us, of the order of what rrfp "
                "needs for one. Larger or fewer microbatches, or fewer stages, would help",
                rank.rank, 1e6 * typical_s,
            )
        return is_bound

    def _look_at_limit(self, rank):
        share = rank.idle_limit_s / rank.wall_s - _unavoidable_share(rank)
        share = self._persists(rank.rank, "limit", share if share > _LIMIT_SHARE else None)
        if share is not None:
            limit = (f"{rank.limit_units} microbatches" if rank.limit_bytes is None
                     else size_text(rank.limit_bytes))
            self._warn(
                "limit",
                "the in-flight limit (%s) held ready forwards of rank %d back for %.0f %% of the "
                "time, besides filling and draining; a larger max_in_flight may help if there is "
                "memory", limit, rank.rank, 100 * share,
            )

    def _persists(self, rank, what, value):
        """The middle value of the last steps, once that many on end had one."""
        values = self._found.setdefault((rank, what), [])
        if value is None:
            values.clear()
            return None
        values.append(value)
        del values[:-_NUM_STEPS]
        return median(values) if len(values) == _NUM_STEPS else None

    def _warn(self, what, text, *values):
        if self._step < self._quiet_until.get(what, 0):
            return
        self._quiet_until[what] = self._step + _QUIET_STEPS
        logger.warning(text, *values)


def _unavoidable_share(rank):
    """What a rank waits in a fixed 1F1B order of as many microbatches, at the most."""
    num_microbatches = len({record.task.split("F")[1] for record in rank.records
                            if "F" in record.task})
    limit = rank.limit_units if rank.limit_units > 0 else rank.peak_units
    return (limit - 1) / (num_microbatches + limit - 1) if num_microbatches else 1.0
