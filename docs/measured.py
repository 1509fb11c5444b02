"""Writes the "Measured" section of README.md from the files in benchmarks/results.

Run it after a benchmark: python docs/measured.py. No figure of that section is typed by hand, and
a test fails when the section and the files differ.
"""

import json
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks/results"
BEGIN = "<!-- measured: written by docs/measured.py from benchmarks/results -->\n"
END = "<!-- end of measured -->\n"


def table(head, rows):
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def origin(file, recorded):
    machine = recorded["machine"]
    changed = " with uncommitted changes" if recorded["uncommitted_changes"] else ""
    priority = ", at real-time priority" if recorded.get("real_time_priority") else ""
    return (f"({machine['processor']}, {machine['cores']} cores, load average "
            f"{machine['load_average'][0]:.1f}{priority}, torch {machine['torch']}, commit "
            f"{recorded['commit'][:10]}{changed}, `{recorded['command']}`: "
            f"[{file.name}](benchmarks/results/{file.name}))")


def readiness(results, lengths="packed sequences give them, the last stage the slowest"):
    rows = []
    for row in results["table"]:
        between = " to ".join(f"{quartile:.2f}" for quartile in row["speed_up_quartiles"])
        rows.append([row["variant"], row["limit"], f"{row['step_ms']:.0f}",
                     f"{row['speed_up']:.2f} ({between})", f"{row['simulated_speed_up']:.2f}",
                     " ".join(map(str, row["peak_units"])), f"{row['host_us_per_task']:.0f}"])
    return (f"Four processes whose tasks sleep for lengths as {lengths}; speed-up over the fixed "
            "1F1B order on the same transport, median and quartiles over rounds.\n\n"
            + table(["hint", "limit", "step, ms", "speed-up", "simulated", "peak units by rank",
                     "host, us a task"], rows))


def readiness_balanced(results):
    return readiness(results, "above, all stages equally heavy")


def host_cost(results):
    rows = []
    for setting, figures in results["table"].items():
        rows += [[setting, name.replace("us_", "").replace("_", " "), f"{middle:.1f}",
                  f"{low:.1f} to {high:.1f}"] for name, (low, middle, high) in figures.items()]
    return ("Stages of one operation: what rrfp itself costs, in microseconds.\n\n"
            + table(["setting", "figure", "median", "quartiles"], rows))


def split_cost(results):
    rows = [[str(row["width"]), str(row["tokens"]), row["dtype"].removeprefix("torch."),
             f"{1e3 * row['B'][1]:.2f}", f"{row['I + W over B'][1]:.2f}",
             " to ".join(f"{quartile:.2f}" for quartile in row["I + W over B"][::2])]
            for row in results["rows"]]
    return ("What a backward in two halves costs (a transformer block, " + results["device"].upper()
            + ").\n\n"
            + table(["width", "tokens", "dtype", "B, ms", "(I + W) / B", "quartiles"], rows))


def gpu_messages():
    """Of benchmarks/gpu: each figure is the range over the runs."""
    file = RESULTS / "gpu_messages.json"
    if not file.exists():
        return []
    study = json.loads(file.read_text())
    names = {4: "4 B", 1 << 20: "1 MiB", 16 << 20: "16 MiB", 128 << 20: "128 MiB"}
    cells = {}
    for row in (row for run in study["runs"] for row in run["rows"]):
        if row["bytes"] in names:
            key = (row["channel"], row["load"])
            cells.setdefault(key, {}).setdefault(row["bytes"], []).append(
                row["computed_to_known_us"][0])
    rows = [[channel, load, *(f"{min(found[b]):.0f} to {max(found[b]):.0f}" for b in names)]
            for (channel, load), found in cells.items()]
    return ["Messages between two GPUs of one host, from the sender's result being computed to the "
            f"receiver's host knowing, in microseconds: medians of {len(study['runs'])} runs, the "
            "devices idle or busy with matrix products.\n\n"
            + table(["channel", "devices", *names.values()], rows)
            + f"\n\n({study['card']}, {study['software']}, `{study['command']}`: "
            f"[{file.name}](benchmarks/results/{file.name}))\n"]


def gpu_schedules():
    """Of benchmarks/gpu/schedules.py: a column for each run of it."""
    file = RESULTS / "gpu_schedules.json"
    study = json.loads(file.read_text())
    cells = {}
    for at, run in enumerate(study["runs"]):
        for step in run["steps"]:
            found = cells.setdefault(step["run"], [""] * len(study["runs"]))
            found[at] = f"{step['median_ms']:.0f} ({step['over_ideal']:.2f})"
    letters = "ABCD"[:len(study["runs"])]
    notes = "; ".join(f"{letter}: {run['note']}"
                      for letter, run in zip(letters, study["runs"], strict=True))
    return [f"Schedules of rrfp and torch on two GPUs, one process each, 16 microbatches: a step "
            "in ms, and over the compute-bound ideal (17/16 of one stage alone; "
            f"[why](docs/profiling.md)). {notes}.\n\n"
            + table(["run", *letters], [[name, *found] for name, found in cells.items()])
            + f"\n\n({study['card']}, {study['software']}, `{study['command']}`, "
            f"B with `RRFP_STREAM_WAITS=off`; few rounds, and torch's 1F1B differs by 2 % between "
            f"runs of the same: what was kept of each is in [{file.name}]"
            f"(benchmarks/results/{file.name}))\n"]


def simulated():
    """The table of benchmarks/policy_table.cc, which no machine's speed enters."""
    file = RESULTS / "policy_table.json"
    if not file.exists():
        return []
    study = json.loads(file.read_text())
    shown = [s for s in study[0]["speed_ups"]
             if not s["fifo"] and s["limit_over_ranks"] in (1.0, 2.0)]
    limits = sorted({s["limit_over_ranks"] for s in shown})
    columns = [(limit, order) for limit in limits for order in ("given", "mid")]
    rows = {}
    for s in shown:
        rows.setdefault(s["policy"], {})[s["limit_over_ranks"], s["order"]] = s["over_zb_h1"]
    cells = [[policy, *(f"{found[c]:.2f}" if c in found else "" for c in columns)]
             for policy, found in rows.items()]
    names = {1.0: "P", 2.0: "2P"}
    head = ["policy", *(f"{names[limit]}, {order}" for limit, order in columns)]
    return [f"The simulated world: {study[0]['ranks']} ranks, {study[0]['microbatches']} "
            f"microbatches, speed-up over fixed ZB-H1, geometric mean of nine models of "
            f"variability ({study[0]['seeds']} seeds each), messages out of order, by in-flight "
            "limit and microbatch order. Rows with `split` or ZB split the backward.\n\n"
            + table(head, cells)
            + f"\n\n(`policy_table`: [{file.name}](benchmarks/results/{file.name}))\n"]


SECTIONS = {
    "readiness": readiness,
    "readiness_balanced": readiness_balanced,
    "host_cost": host_cost,
    "split_cost": split_cost,
    "split_cost_cuda": split_cost,
}


def section():
    """The text between the marks."""
    parts = []
    for name, write in SECTIONS.items():
        file = RESULTS / f"{name}.json"
        if file.exists():
            recorded = json.loads(file.read_text())
            parts.append(f"{write(recorded['results'])}\n\n{origin(file, recorded)}\n")
    parts += gpu_messages() + gpu_schedules() + simulated()
    return "\n".join(parts) or "No results are recorded in `benchmarks/results` yet.\n"


def page(text):
    """`text` of README.md with the section as the files have it."""
    marked = re.compile(re.escape(BEGIN) + ".*?" + re.escape(END), re.DOTALL)
    if len(marked.findall(text)) != 1:
        raise SystemExit("README.md must hold the two marks of the measured section once")
    return marked.sub(lambda _: BEGIN + section() + END, text)


if __name__ == "__main__":
    readme = ROOT / "README.md"
    readme.write_text(page(readme.read_text()))
