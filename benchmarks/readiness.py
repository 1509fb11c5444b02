"""Does readiness pay, and as much as simulation says? Four processes, sleeping tasks.

Every round draws the durations of one step and runs all variants on them, one after the other,
so that all see the same machine. A ratio is a variant's step time against the fixed 1F1B order
on the same transport; beside it stands the ratio that rrfp.simulate() gives for the same
durations. Sleeping tasks need no cores, so the figures hold on a small machine.

    python benchmarks/readiness.py [--balanced] [--rounds 9] [--forward-ms 20]

With the last stage 1.8 times as heavy, as in the trace, that rank is busy all the time and no
order can gain much; ``--balanced`` shows what lengths alone leave to gain.
"""

import argparse
import statistics
import sys
import time

import record
import sleeping_model as model
from processes import run_ranks

NUM_RANKS, NUM_MICROBATCHES = 4, 16
LATENCY_S = 0.0002
BASELINE = "1f1b slack 0"
VARIANTS = {
    BASELINE: {"hint": "1f1b", "slack": 0},
    "1f1b slack 0, mid": {"hint": "1f1b", "slack": 0, "microbatch_order": "mid"},
    "auto": {"hint": "auto"},
    "auto, mid": {"hint": "auto", "microbatch_order": "mid"},
    "bf": {"hint": "bf"},
}
LIMITS = {"P": NUM_RANKS, "2P": 2 * NUM_RANKS}


def configurations():
    """(name, limit name, options) of all that is compared. The fixed order keeps to 1F1B's own
    peak at any limit, so the larger limit changes nothing for it and is not run twice."""
    for name, options in VARIANTS.items():
        for limit_name, limit in LIMITS.items():
            if options.get("slack") == 0 and limit_name != "P":
                continue
            yield name, limit_name, {**options, "max_in_flight": limit}


def measure_rank(rank, arguments):
    """One rank: all rounds, all configurations. Rank 0 returns the rows of all ranks."""
    import torch.distributed as dist

    import rrfp

    stage = model.SleepingStage(rank)
    inputs, targets = model.batch(NUM_MICROBATCHES)
    rows = []
    for index in range(-1, arguments.rounds):  # round -1 warms up and is dropped
        durations, _ = model.packed_durations(
            arguments.seed + index,
            NUM_RANKS,
            NUM_MICROBATCHES,
            arguments.forward_ms / 1000,
            balanced=arguments.balanced,
        )
        stage.durations = durations
        costs = [durations["F", 0, m] + durations["B", 0, m] for m in range(NUM_MICROBATCHES)]
        compared = list(configurations())
        for name, limit_name, options in compared[:: 1 if index % 2 else -1]:
            dist.barrier()
            start = time.monotonic()
            result = rrfp.run_pipeline(
                {rank: stage},
                inputs if rank == 0 else None,
                targets if rank == NUM_RANKS - 1 else None,
                model.loss_fn,
                costs=costs,
                **options,
            )
            own = {"start": start, "end": time.monotonic(), **of_report(result.report)}
            gathered = [None] * NUM_RANKS if rank == 0 else None
            dist.gather_object(own, gathered)
            if rank == 0 and index >= 0:
                row = {
                    "round": index,
                    "variant": name,
                    "limit": limit_name,
                    **merged(gathered),
                    **simulated(durations, costs, options),
                }
                rows.append(row)
    return rows


def of_report(report):
    """This rank's peak units and rrfp's own time per task."""
    own = report.ranks[0]
    return {"peak": own.peak_units, "host_us": own.host_s * 1e6 / own.num_tasks}


def merged(gathered):
    return {
        "step_s": max(own["end"] for own in gathered) - min(own["start"] for own in gathered),
        "peaks": [own["peak"] for own in gathered],
        "host_us": max(own["host_us"] for own in gathered),
    }


def simulated(durations, costs, options):
    import rrfp

    world = rrfp.simulate(
        durations,
        num_stages=NUM_RANKS,
        num_microbatches=NUM_MICROBATCHES,
        latency=LATENCY_S,
        costs=costs,
        **options,
    )
    return {"simulated_s": world.makespan_s, "simulated_peaks": list(world.peak_units)}


def summarise(rows):
    """Per configuration: medians over rounds of step time and of the ratios to the baseline."""
    table = []
    base = {row["round"]: row for row in rows if row["variant"] == BASELINE}
    for name, limit_name, _ in configurations():
        own = [r for r in rows if (r["variant"], r["limit"]) == (name, limit_name)]
        measured = [base[r["round"]]["step_s"] / r["step_s"] for r in own]
        expected = [base[r["round"]]["simulated_s"] / r["simulated_s"] for r in own]
        kept = [m / e for m, e in zip(measured, expected, strict=True)]
        table.append(
            {
                "variant": name,
                "limit": limit_name,
                "step_ms": statistics.median(r["step_s"] for r in own) * 1e3,
                "speed_up": statistics.median(measured),
                "speed_up_quartiles": record.quantiles(measured)[::2],
                "simulated_speed_up": statistics.median(expected),
                "measured_over_simulated": statistics.median(kept),
                "peak_units": [max(r["peaks"][k] for r in own) for k in range(NUM_RANKS)],
                "simulated_peak_units": [
                    max(r["simulated_peaks"][k] for r in own) for k in range(NUM_RANKS)
                ],
                "host_us_per_task": statistics.median(r["host_us"] for r in own),
            }
        )
    return table


def show(table):
    print(
        f"{'variant':<19}{'limit':>6}{'step ms':>9}{'speed-up':>10}{'simulated':>11}"
        f"{'kept':>7}  {'peak units':<16}{'host us/task':>13}"
    )
    for row in table:
        print(
            f"{row['variant']:<19}{row['limit']:>6}{row['step_ms']:>9.0f}"
            f"{row['speed_up']:>10.3f}{row['simulated_speed_up']:>11.3f}"
            f"{row['measured_over_simulated']:>7.3f}  {row['peak_units']!s:<16}"
            f"{row['host_us_per_task']:>13.0f}"
        )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--forward-ms", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--balanced", action="store_true", help="stages of equal weight: no rank is saturated"
    )
    parser.add_argument("--out", help="name of the result file, or empty for none")
    arguments = parser.parse_args()
    if arguments.out is None:
        arguments.out = "readiness_balanced" if arguments.balanced else "readiness"
    rows = run_ranks(measure_rank, NUM_RANKS, arguments, timeout_s=60 + arguments.rounds * 120)[0]
    table = summarise(rows)
    show(table)
    if arguments.out:
        record.write(arguments.out, {"arguments": vars(arguments), "table": table, "rows": rows})
    short = [r for r in table if r["measured_over_simulated"] < 0.95]
    for row in short:
        print(
            f"{row['variant']} at limit {row['limit']} keeps only "
            f"{row['measured_over_simulated']:.3f} of the simulated ratio, wanted 0.95"
        )
    return 1 if short else 0


if __name__ == "__main__":
    sys.exit(main())
