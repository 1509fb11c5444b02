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
    return (f"({machine['processor']}, {machine['cores']} cores, torch {machine['torch']}, commit "
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
}


def section():
    """The text between the marks."""
    parts = []
    for name, write in SECTIONS.items():
        file = RESULTS / f"{name}.json"
        if file.exists():
            recorded = json.loads(file.read_text())
            parts.append(f"{write(recorded['results'])}\n\n{origin(file, recorded)}\n")
    parts += simulated()
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
