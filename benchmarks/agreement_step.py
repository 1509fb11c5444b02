"""What agreement costs inside a step: tasks of 5 ms whose lengths differ by 5 % between members.

Four processes are two pipelines of two stages; the ranks of a stage are an agreement group. Tasks
sleep. At the end of each stands a collective that costs nothing itself: no member leaves before
the slowest would have come to it. Every round draws new lengths and runs all variants on them:

    bf, agreed       readiness; the members agree on an order task by task
    bf, lockstep     no collective and no group: every task takes what its slowest member takes,
                     which is what members that agree for nothing would need
    1f1b, fixed      the fixed order, which needs no agreement, with the collectives
    1f1b, lockstep   the fixed order without them, as above

What a pair differs by is what the members pay for their skew and, for bf, for the agreement. The
agreement costs what bf pays beyond the fixed order; ends with 1 when that is 1 % of the step.

    python benchmarks/agreement_step.py [--rounds 20] [--task-ms 5] [--skew 0.05]
        [--out agreement_step]
"""

import argparse
import mmap
import random
import statistics
import struct
import sys
import tempfile
import time
from pathlib import Path

import record
import torch
from processes import run_ranks
from torch import nn

NUM_STAGES, NUM_MEMBERS, NUM_MICROBATCHES = 2, 2, 8
LIMIT = 4
BUDGET = 0.01  # of the step
DEADLINE_S = 30.0
VARIANTS = {
    "bf, agreed": ({"hint": "bf"}, True, True),
    "bf, lockstep": ({"hint": "bf"}, False, False),
    "1f1b, fixed": ({"hint": "1f1b", "slack": 0}, False, True),
    "1f1b, lockstep": ({"hint": "1f1b", "slack": 0}, False, False),
}
PAIRS = {"bf, agreed": "bf, lockstep", "1f1b, fixed": "1f1b, lockstep"}


def draw_lengths(seed, task_s, skew):
    """{(kind, stage, microbatch): seconds by member}."""
    rng = random.Random(seed)
    return {
        (kind, stage, microbatch): [
            task_s * max(0.1, rng.gauss(1.0, skew)) for _ in range(NUM_MEMBERS)
        ]
        for kind in "FB"
        for stage in range(NUM_STAGES)
        for microbatch in range(NUM_MICROBATCHES)
    }


class Meetings:
    """When each member's share of each task ends, in memory that all processes map."""

    NUM_TASKS = 2 * NUM_STAGES * NUM_MICROBATCHES

    def __init__(self, path, num_steps):
        num_bytes = 8 * num_steps * self.NUM_TASKS * NUM_MEMBERS
        with open(path, "r+b") as file:
            file.truncate(num_bytes)
            self._map = mmap.mmap(file.fileno(), num_bytes)

    def _at(self, step, kind, stage, microbatch, member):
        task = ("FB".index(kind) * NUM_STAGES + stage) * NUM_MICROBATCHES + microbatch
        return 8 * ((step * self.NUM_TASKS + task) * NUM_MEMBERS + member)

    def leave_together(self, step, task, member, end_ns):
        """Sleep until the last member's share ends."""
        struct.pack_into("q", self._map, self._at(step, *task, member), end_ns)
        sleep_until(end_ns)
        for other in range(NUM_MEMBERS):
            at = self._at(step, *task, other)
            while not (other_ns := struct.unpack_from("q", self._map, at)[0]):
                if time.monotonic_ns() > end_ns + DEADLINE_S * 1e9:
                    raise TimeoutError(f"member {other} did not come to {task}")
                time.sleep(0.00005)
            sleep_until(other_ns)


def sleep_until(end_ns):
    time.sleep(max(0.0, (end_ns - time.monotonic_ns()) / 1e9))


class Pass(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, stage, microbatch):
        ctx.stage, ctx.microbatch = stage, microbatch
        stage.take_time("F", microbatch)
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx, gradient):
        ctx.stage.take_time("B", ctx.microbatch)
        return gradient, None, None


class MeetingStage(nn.Module):
    def __init__(self, index, member, meetings):
        super().__init__()
        self.index, self.member, self.meetings = index, member, meetings
        self.weight = nn.Parameter(torch.ones(8))
        self.lengths, self.step, self.meets = {}, 0, True

    def take_time(self, kind, microbatch):
        task = kind, self.index, microbatch
        start_ns = time.monotonic_ns()
        if not self.meets:
            return sleep_until(start_ns + int(1e9 * max(self.lengths[task])))
        end_ns = start_ns + int(1e9 * self.lengths[task][self.member])
        return self.meetings.leave_together(self.step, task, self.member, end_ns)

    def forward(self, hidden, microbatch):
        return Pass.apply(hidden * self.weight, self, microbatch), microbatch


def loss_fn(output, target):
    return (output[0] - target).square().mean()


def measure_rank(rank, arguments, path):
    """All rounds on one rank; rank 0 returns the rows."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    import rrfp

    mesh = init_device_mesh("cpu", (NUM_STAGES, NUM_MEMBERS), mesh_dim_names=("pp", "tp"))
    index, member = mesh["pp"].get_local_rank(), mesh["tp"].get_local_rank()
    meetings = Meetings(path, (arguments.rounds + 1) * len(VARIANTS))
    stage = MeetingStage(index, member, meetings)
    pipelines = {
        agrees: rrfp.Pipeline(
            {index: stage}, group=mesh, agreement_group="auto" if agrees else None
        )
        for agrees in (True, False)
    }
    inputs = [(torch.full((2, 8), float(m)), m) for m in range(NUM_MICROBATCHES)]
    targets = [torch.zeros(2, 8) for _ in inputs]
    rows = []
    for round_index in range(-1, arguments.rounds):  # round -1 warms up and is dropped
        stage.lengths = draw_lengths(
            arguments.seed + round_index, arguments.task_ms / 1e3, arguments.skew
        )
        for name in list(VARIANTS)[:: 1 if round_index % 2 else -1]:
            options, agrees, stage.meets = VARIANTS[name]
            dist.barrier()
            start = time.monotonic()
            report = pipelines[agrees].step(
                inputs if index == 0 else None,
                targets if index == NUM_STAGES - 1 else None,
                loss_fn if index == NUM_STAGES - 1 else None,
                max_in_flight=LIMIT,
                **options,
            ).report.ranks[0]
            own = start, time.monotonic(), report.idle_agreement_s, report.order
            stage.step += 1
            gathered = [None] * dist.get_world_size() if rank == 0 else None
            dist.gather_object(own, gathered)
            if rank == 0 and round_index >= 0:
                rows.append({"round": round_index, "variant": name, **merged(gathered, agrees)})
    for pipeline in pipelines.values():
        pipeline.close()
    return rows


def merged(gathered, agrees):
    starts, ends, waits, orders = zip(*gathered)
    if agrees and (orders[0] != orders[1] or orders[2] != orders[3]):
        raise SystemExit("two members of an agreement group ran different orders")
    return {
        "step_s": max(ends) - min(starts),
        "waits_for_members_s": max(waits),
    }


def summarise(rows):
    by_round = {(row["variant"], row["round"]): row for row in rows}
    rounds = sorted({row["round"] for row in rows})
    table = []
    for name in VARIANTS:
        own = [by_round[name, r] for r in rounds]
        row = {
            "variant": name,
            "step_ms": statistics.median(r["step_s"] for r in own) * 1e3,
            "waits_for_members_ms": statistics.median(r["waits_for_members_s"] for r in own) * 1e3,
        }
        if name in PAIRS:
            costs = [
                by_round[name, r]["step_s"] / by_round[PAIRS[name], r]["step_s"] - 1
                for r in rounds
            ]
            row["cost"] = statistics.median(costs)
            row["cost_quartiles"] = record.quantiles(costs)[::2]
        table.append(row)
    return table


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--task-ms", type=float, default=5.0)
    parser.add_argument("--skew", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", help="also write results/OUT.json")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "meetings"
        path.touch()
        rows = run_ranks(measure_rank, NUM_STAGES * NUM_MEMBERS, arguments, str(path),
                         timeout_s=600)[0]
    table = summarise(rows)
    for row in table:
        cost = f"  cost {row['cost']:+.2%}" if "cost" in row else ""
        print(f"{row['variant']:<16} step {row['step_ms']:7.2f} ms{cost}")
    agreed, fixed = (next(r for r in table if r["variant"] == name) for name in PAIRS)
    agreement_cost = agreed["cost"] - fixed["cost"]
    print(f"agreement {agreement_cost:+.2%} of the step")
    if arguments.out:
        results = {"table": table, "agreement_cost": agreement_cost, "budget": BUDGET}
        record.write(arguments.out, {**results, "rows": rows})
    return 0 if agreement_cost < BUDGET else 1


if __name__ == "__main__":
    sys.exit(main())
