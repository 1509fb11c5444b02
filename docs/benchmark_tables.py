"""A writer for each kind of file in benchmarks/results: its figures as Markdown tables."""

import json
import string
from pathlib import Path
from statistics import geometric_mean, mean, median

RESULTS = Path(__file__).resolve().parents[1] / "benchmarks/results"


def table(head, rows):
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def load(name):
    return json.loads((RESULTS / name).read_text())


def _range(low, high, digits=2):
    return f"{low:.{digits}f} to {high:.{digits}f}"


def readiness(results):
    rows = []
    for row in results["table"]:
        rows.append([row["variant"], row["limit"], f"{row['step_ms']:.0f}",
                     f"{row['speed_up']:.2f} ({_range(*row['speed_up_quartiles'])})",
                     f"{row['simulated_speed_up']:.2f}",
                     " ".join(map(str, row["peak_units"])), f"{row['host_us_per_task']:.0f}"])
    return table(["hint", "limit", "step, ms", "speed-up", "simulated", "peak units by rank",
                  "host, us a task"], rows)


def waiting(results):
    rows = [[row["workload"], row["variant"], f"{row['step_ms']:.0f}", f"{row['speed_up']:.2f}",
             f"{row['simulated_speed_up']:.2f}", f"{row['measured_over_simulated']:.3f}"]
            for row in results["rows"]]
    return table(["lengths", "hint", "step, ms", "speed-up", "simulated",
                  "measured over simulated"], rows)


def host_cost(results):
    """What rrfp adds also in direct tasks of the same run, which hold on a slower machine too."""
    rows = []
    direct = None
    for setting, figures in results["table"].items():
        direct = figures.get("us_per_task_direct", direct)  # a setting without: the one before
        for name, (low, middle, high) in figures.items():
            is_share = name not in ("us_per_task_direct", "us_per_task_reported")
            share = f"{middle / direct[1]:.2f}" if is_share else ""
            rows.append([setting, name.replace("us_", "").replace("_", " "), f"{middle:.1f}",
                         _range(low, high, 1), share])
    return table(["setting", "figure", "median", "quartiles", "in direct tasks"], rows)


def same_memory(results):
    runs = ["fixed", "fixed, mid", "fixed, twice the warm-up", "fixed, twice the warm-up, mid",
            "auto", "auto, mid", "auto, twice the limit", "auto, twice the limit, mid"]
    rows = []
    for row in results["rows"]:
        found = [row["runs"].get(run) for run in runs]
        rows.append([row["case"], *(f"{run['speed_up']:.2f}" if run else "" for run in found)])
    return table(["", *runs], rows)


def turns(results):
    rows = []
    for row in results["rows"]:
        direct, side_by_side, in_turn = (
            row["us_per_task"][name] for name in ("direct", "side by side", "in turn"))
        rows.append([
            str(row["ranks"]), f"{direct[1]:.0f}",
            *(f"{each[1]:.0f} ({_range(each[0], each[2], 0)})" for each in (side_by_side, in_turn)),
            f"{in_turn[1] / side_by_side[1]:.2f}", f"{row['share_in_turn_by_trial']:.0%}"])
    return table(["ranks", "directly, us a task", "side by side", "in turn", "ratio",
                  "steps in turn, by trial"], rows)


def host_instructions(results):
    return table(["per task", "instructions"],
                 [[name, f"{count:,}"] for name, count in results["instructions_per_task"].items()])


def host_cost_sentence():
    """A sentence: microseconds per task over the plain loop, by mode."""
    def medians(name):
        table = load(name)["results"]["table"]
        return {mode: row["us_per_task_over_direct"][1] for mode, row in table.items()
                if "us_per_task_over_direct" in row}

    quick = medians("host_cost.json")
    alone, threads, between = (f"{quick[mode]:.0f}" for mode in (
        "one process, one rank", "one process, two ranks", "two processes"))
    slow = [f"{medians(name)['two processes']:.0f}"
            for name in ("host_cost_32_cores.json", "host_cost_throttled.json")]
    return (f"rrfp itself takes {alone} us a task in one process with one rank, {threads} with two "
            "ranks as threads of it, the mode of the [example](#example), and "
            f"{between} between processes, on a quick processor left alone; {' and '.join(slow)} "
            "between processes on two slower machines.")


def random_cost(results):
    return table(["what, us", "median", "quartiles"],
                 [[name, f"{middle:.1f}", _range(low, high, 1)]
                  for name, (low, middle, high) in results["us"].items()])


def split_cost(results):
    rows = [[str(row["width"]), str(row["tokens"]), row["dtype"].removeprefix("torch."),
             f"{1e3 * row['B'][1]:.2f}", f"{row['I + W over B'][1]:.2f}",
             _range(*row["I + W over B"][::2])] for row in results["rows"]]
    return (f"On {results['device'].upper()}:\n\n"
            + table(["width", "tokens", "dtype", "B, ms", "(I + W) / B", "quartiles"], rows))


def split_cost_host(results):
    rows = [[str(row["width"]), *(f"{1e3 * row[part][1]:.2f}" for part in "BIW"),
             f"{row['I + W over B'][1]:.2f}", _range(*row["I + W over B"][::2])]
            for row in results["rows"]]
    counts = results["instructions"]
    ratio = (counts["I"] + counts["W"]) / counts["B"]
    return (table(["width", "B, ms", "I, ms", "W, ms", "(I + W) / B", "quartiles"], rows)
            + "\n\nInstructions at width 32: "
            + ", ".join(f"{part} {counts[part]:,}" for part in "BIW")
            + f", hence (I + W) / B {ratio:.2f}.")


def agreement_cost(results):
    rows = []
    for row in results["table"]:
        for what in ("decide", "meet", "all_gather_gloo", "all_gather_nccl"):
            if what in row:
                rows.append([str(row["members"]), what.replace("_", " "),
                             *(f"{row[what][name] / 1000:.2f}" for name in
                               ("p50_ns", "p90_ns", "p99_ns"))])
    counts = [f"Of {row['members']} members a decision takes {row['instructions']['decide']:.0f} "
              f"instructions and an arrival {row['instructions']['arrive']:.0f}.\n\n"
              for row in results["table"] if "instructions" in row]
    return "".join(counts) + table(["members", "what, us", "median", "90 %", "99 %"], rows)


def agreement_step(results):
    rows = []
    for row in results["table"]:
        cost = "" if "cost" not in row else (
            f"{100 * row['cost']:.1f} % ({100 * row['cost_quartiles'][0]:.1f} to "
            f"{100 * row['cost_quartiles'][1]:.1f})")
        rows.append([row["variant"], f"{row['step_ms']:.1f}", cost])
    return table(["members", "step, ms", "beyond lockstep"], rows)


def soak(results):
    first, last = ([of_rank[at] for of_rank in results["samples"]] for at in (0, -1))
    rows = [[str(rank), *(f"{a[name]} to {b[name]}" for name in ("descriptors", "threads", "kib"))]
            for rank, (a, b) in enumerate(zip(first, last, strict=True))]
    return (f"{results['steps']} steps in {results['seconds']:.0f} s; first and last sample:\n\n"
            + table(["rank", "descriptors", "threads", "resident KiB"], rows))


def suite_runs(study):
    rows = []
    for run in study["runs"]:
        what = (f"{run['tests']:,} tests" if "tests" in run
                else "not counted" if run["file_runs"] is None else f"{run['file_runs']} files")
        causes = "; ".join(f"{count}: {why}" for why, count in run.get("causes", {}).items())
        rows.append([run["commit"], run["how"], what, str(run["failed"]), causes])
    return table(["commit", "how", "run", "failed", "why"], rows)


def gpu_messages(study):
    names = {4: "4 B", 1 << 20: "1 MiB", 16 << 20: "16 MiB", 128 << 20: "128 MiB"}
    cells = {}
    for row in (row for run in study["runs"] for row in run["rows"]):
        if row["bytes"] in names:
            key = (row["channel"], row["load"])
            cells.setdefault(key, {}).setdefault(row["bytes"], []).append(
                row["computed_to_known_us"][0])
    rows = [[channel, load, *(_range(min(found[b]), max(found[b]), 0) for b in names)]
            for (channel, load), found in cells.items()]
    return (f"Medians of {len(study['runs'])} runs, in microseconds:\n\n"
            + table(["channel", "devices", *names.values()], rows))


def gpu_schedules(study):
    cells = {}
    for at, run in enumerate(study["runs"]):
        for step in run["steps"]:
            found = cells.setdefault(step["run"], [""] * len(study["runs"]))
            found[at] = f"{step['median_ms']:.0f} ({step['over_ideal']:.2f})"
    letters = string.ascii_uppercase[:len(study["runs"])]
    notes = "; ".join(f"{letter}: {run['note']}"
                      for letter, run in zip(letters, study["runs"], strict=True))
    return f"{notes}.\n\n" + table(["run", *letters], [[n, *found] for n, found in cells.items()])


def gpu_jitter(results):
    rows = []
    for row in (row for row in results["rows"] if row["what"] == "step"):
        span = _range(min(row["speed_ups"]), max(row["speed_ups"]))
        rows.append([row["level"], row["run"], f"{row['median_ms']:.0f}",
                     f"{row['speed_up']:.2f} ({span})",
                     f"{row['simulated_speed_up']:.2f}", str(row["peak_units"]),
                     f"{row['host_us']:.0f}", f"{row['gil_late_us'][1]:.0f}"])
    launches = [row["us_a_task"] for row in results["rows"] if row["what"] == "launch"]
    return (f"With tasks of no length a step takes {_range(min(launches), max(launches), 0)} us a "
            "task, all ranks together.\n\n"
            + table(["level", "run", "step, ms", "speed-up (rounds)", "simulated", "peak units",
                     "host, us a task", "late for the interpreter, us (95 %)"], rows))


def gpu_arrival(results):
    names = {
        "arrival_to_start_us": "its host late: arrival to call of the stage function",
        "computed_to_call_us": "its GPU late: result computed to call of the stage function",
        "computed_to_kernel_us": "its GPU late: result computed to first kernel of the stage",
        "plain_warm_us": "that call without rrfp",
        "plain_after_sleep_us": "that call without rrfp, after 3 ms of sleep",
        "host_us": "per task reported",
    }
    rows = [[names[key], f"{middle:.1f}", f"{low:.1f} to {high:.1f}"]
            for key, (low, middle, high) in results["quartiles"].items()]
    return "In microseconds:\n\n" + table(["figure", "median", "quartiles"], rows)


def gpu_first_step(study):
    rows = [[run["note"], step["run"], f"{step['median_ms']:.0f}", f"{step['over_ideal']:.2f}"]
            for run in study["runs"] for step in run["steps"]]
    return table(["run", "schedule", "step, ms", "over the ideal"], rows)


def gpu_breadth(study):
    rows = [[f"`{run['command']}`", run["result"] + (f"; failed: {run['failed']}"
                                                     if "failed" in run else "")]
            for run in study["runs"]]
    return table(["command", "result"], rows)


def policy_table(study):
    """Of 8 ranks; messages out of order."""
    shown = [s for s in study[0]["speed_ups"] if s["limit_over_ranks"] in (1.0, 2.0)]
    limits = sorted({s["limit_over_ranks"] for s in shown})
    columns = [(limit, order) for limit in limits for order in ("given", "mid")]
    rows = {}
    for s in shown:
        for order in ("given", "mid"):
            rows.setdefault(s["policy"], {})[s["limit_over_ranks"], order] = s[order][0]
    cells = [[policy, *(f"{found[c]:.2f}" if c in found else "" for c in columns)]
             for policy, found in rows.items()]
    names = {1.0: "P", 2.0: "2P"}
    head = ["policy", *(f"{names[limit]}, {order}" for limit, order in columns)]
    constant = next(part["constant_durations"] for part in study if "constant_durations" in part)
    return (f"{study[0]['ranks']} ranks, {study[0]['microbatches']} microbatches, "
            f"{study[0]['seeds']} seeds for each model:\n\n" + table(head, cells)
            + "\n\nWhere nothing varies, against the fixed order of the same family:\n\n"
            + table(["policy", "cases", "behind by over 1 %", "worst", "mean"],
                    [[row["policy"], str(row["cases"]), str(row["behind_by_over_1_percent"]),
                      f"{row['worst']:.2f}", f"{row['mean']:.3f}"] for row in constant]))


def step_draws(lines):
    """Of each policy, the geometric mean of makespan over lower bound."""
    ratios = {}
    for line in lines:
        for policy, makespan_us in line["makespan_us"].items():
            ratios.setdefault(policy, []).append(makespan_us / line["lower_bound_us"]["split"])
    rows = {}
    for policy, found in ratios.items():
        name, _, limit = policy.rpartition(", limit ")
        product = 1.0
        for ratio in found:
            product *= ratio ** (1 / len(found))
        rows.setdefault(name, {})[limit] = f"{product:.2f}"
    return (f"{len(lines)} steps; makespan over the lower bound of a split step, geometric "
            "mean:\n\n" + table(["policy", "limit P", "limit 2P"],
                                [[name, row["P"], row["2P"]] for name, row in rows.items()]))


def gpu_lengths(results):
    """Geometric means over the draws."""
    by_run = {}
    for row in results["rows"]:
        if row["what"] == "step":
            by_run.setdefault(row["run"], []).append(row)
    columns = ("ratio", "simulated_ratio", "simulated_in_run_ratio", "real_over_simulated_in_run")
    rows = [[run, *(f"{geometric_mean([row[name] for row in of_run]):.3f}" for name in columns),
             f"{median(row['sm_mhz'] for row in of_run):.0f}",
             f"{100 * mean(mean(row['slower_than_at_rest']) - 1 for row in of_run):.0f} %"]
            for run, of_run in by_run.items()]
    return table(["run", "speed-up", "simulated, at rest", "simulated, in run",
                  "real over simulated, in run", "clock, MHz", "tasks slower than at rest"], rows)


def _channel_name(row):
    num_free = row.get("free_sms", 0)
    return row["channel"] + (f", {num_free} SMs left free" if num_free else "")


def gpu_gemm_slowdown(results):
    rows = [[_channel_name(row), row["product"], f"{1e3 * row['sender_alone_ms']:.0f}",
             f"{100 * row['sender_slow_down']:.1f} %", f"{100 * row['receiver_slow_down']:.1f} %",
             f"{row['gb_per_s']:.0f}"] for row in results["rows"]]
    return table(["channel", "product", "alone, us", "slow-down, sender", "slow-down, receiver",
                  "messages, GB/s"], rows)


def gpu_free_sms(results):
    sizes = list(results["rows"][0]["message_us_idle"])
    rows = [[row["product"], str(row["free_sms"]), f"{row['product_us']:.0f}",
             f"{100 * row['price']:.1f} %",
             *(f"{row[f'message_us_{when}'][size]:.0f}" for size in sizes
               for when in ("idle", "beside"))] for row in results["rows"]]
    return table(["product", "SMs left free", "product, us", "price",
                  *(f"{size}, {when}, us" for size in sizes for when in ("idle", "beside"))], rows)
