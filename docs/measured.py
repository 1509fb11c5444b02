"""Writes docs/benchmarks.md, and the table of README.md, from the files in benchmarks/results.

Run it after a benchmark: python docs/measured.py. No figure there is typed by hand, and a test
fails when the pages and the files differ.
"""

import json
import re
import sys
import textwrap
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import benchmark_tables as tables  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks/results"
BEGIN = "<!-- measured: written by docs/measured.py from benchmarks/results -->\n"
END = "<!-- end of measured -->\n"

# File -> what was done, what it is compared with, and what it does not show.
ABOUT = {
    "readiness.json": (
        "Readiness where lengths vary, last stage the slowest",
        "Four processes whose tasks sleep for lengths as packed sequences give them. Speed-up over "
        "the fixed 1F1B order on the same transport (the first row), median and quartiles over "
        "rounds, of each round's own ratio (so not quite that of the medians); `mid` is a "
        "microbatch order by known costs, which helps a fixed order too. With one stage the "
        "slowest by far, that stage is all there is to wait for: readiness gains nothing, and at "
        "limit P loses nothing."),
    "readiness_balanced.json": (
        "Readiness where lengths vary, stages equally heavy",
        "As above. At the default limit P and in the given order `auto` and `bf` lose up to 2 %; "
        "the gain comes with twice the limit, and with `mid`."),
    "same_memory.json": (
        "Readiness, memory and the order of microbatches apart",
        "What each gives, simulated by the engine that runs real steps: 8 ranks, 32 microbatches, "
        "30 draws, speed-up over fixed 1F1B. A fixed order, too, can hold twice as many "
        "microbatches: 1F1B that begins with twice as many forwards on each rank (a list of tasks, "
        "`slack=0`). Most of what `auto` gains with `mid` and twice the limit such an order gains "
        "as well. What readiness adds is the difference to it: 1 to 4 % where tasks vary, 6 % "
        "where messages are late; and that nobody has to write the list. At the default limit "
        "the fixed order with `mid` is ahead of `auto` with `mid`, and the guard, which has no say "
        "in a simulated step, runs it then."),
    "waiting.json": (
        "Waiting and the guard",
        "The same at limit P, with packed lengths and with jitter J2, real and simulated. Without "
        "the guard `auto` is 2 % slower than the fixed order; with it, as fast."),
    "host_cost.json": (
        "What rrfp costs per task",
        "Stages of one operation, in microseconds: over running the stage functions directly, and "
        "how late an idle worker starts what has arrived. The budgets (25 us in one process, 60 "
        "between processes, 30 from arrival to start) are for a machine that runs a direct task in "
        "16 us: 1.6, 3.8 and 1.9 direct tasks."),
    "host_cost_32_cores.json": (
        "The same on 32 cores",
        "There a direct task takes four times as long, and idle workers spin."),
    "host_cost_throttled.json": (
        "The same, later, on a machine seven times slower",
        "The plain loop takes seven times as long here as above, so compare what stands over it "
        "with it: 0.23 of a task in one process (0.65 above), 0.37 with two ranks (2.0 above), "
        "0.54 between processes (1.6 above). What arrives at a worker that has slept for 3 ms is "
        "started as late as a plain call of the stage takes after such a sleep: the processor is "
        "cold then, whatever it runs; after 0.2 ms it is not."),
    "turns.json": (
        "Threads that take turns",
        "What it is worth to the ranks of one process that those whose tasks are short take turns "
        "([ADR 0015](adr/0015-threads-with-short-tasks-take-turns.md)), in microseconds a task, "
        "medians and quartiles, all ways alternating in one run. The tables above were measured "
        "before there were turns. With two ranks the gain is near what the trial asks for, so it "
        "is not always found."),
    "host_instructions.json": (
        "Instructions per task",
        "As counted by callgrind, which other load does not change: one process, one rank, stages "
        "of one operation, forward and backward, run by rrfp and by a plain loop."),
    "random_cost.json": (
        "What random numbers cost",
        "Keyed by seed, step, stage and microbatch, per task and per operation, beside torch's "
        "own generator."),
    "split_cost.json": (
        "What a backward in two halves costs, on a CPU",
        "A transformer block: I and W together over the full backward B."),
    "split_cost_32_cores.json": (
        "The same on 32 cores", "There two halves cost a fifth to a third more than the whole."),
    "split_cost_cuda.json": (
        "The same on a GPU",
        "Where kernels take less than the host needs to launch them (bf16 at widths 1,024 and "
        "2,048), two halves cost a tenth more; where the GPU decides, 0 to 3 %."),
    "split_cost_host.json": (
        "What two halves cost the host",
        "Eight transformer blocks so small that their arithmetic vanishes, four microbatches in "
        "flight, one thread and its own time. `.grad` is there, no hooks and no custom functions: "
        "the best case."),
    "agreement_cost.json": (
        "A decision of an agreement group",
        "Beside an all-gather of one integer, which would decide the same. `decide`: all members "
        "ask at once for a decision that can be made; `meet`: all let a task arrive at once and "
        "spin until it is decided."),
    "agreement_step.json": (
        "Agreement inside a step",
        "Tasks of 5 ms whose lengths differ by 5 % between the members, over lockstep (no "
        "difference): what agreement pays, and what a fixed order pays for the same lengths."),
    "gpu_messages.json": (
        "Messages between two GPUs of one host",
        "From the sender's result being computed to the receiver's host knowing; devices idle, or "
        "busy with kernels of 850 us. When a result was computed is read from the device's clock; "
        "for torch's send and recv by asking an event from Python, which may see it some 20 us "
        "late, so its idle figures are too small by as much."),
    "gpu_messages_h100.json": (
        "The same on H100s", "An earlier version."),
    "gpu_schedules.json": (
        "Schedules beside torch's on two GPUs",
        "One process each, 16 equal microbatches: a step in ms, and over the compute-bound ideal "
        "(17/16 of one stage alone; [why](profiling.md)), medians of 12 steps in 3 alternating "
        "rounds. Nothing varies here, so a fixed order is as good as it gets. Two stages per rank "
        "have a smaller bubble (idle time while the pipeline fills and drains) than the ideal's, "
        "where the GPU decides (A); where the host does "
        "(C: it needs 198 ms only to launch), their launches cost more than they gain. "
        "`add in products` takes 5 % off the time of all kernels; it is that, not readiness, and "
        "the smaller bubble that put rrfp's best 1.06 times ahead of torch's best in A (1.03 "
        "without it; `slack=0` is as fast). In C it is 1.02 times. In D the host is slower still "
        "(225 ms only to launch, where the kernels take 180), so there the ideal is the host's: "
        "the fixed interleaved order is 1.09 times ahead of torch's best, `bfw` 1.03, with add in "
        "products 1.06, while `zbv` loses, for it launches most: torch's 1F1B is 1.08 times as "
        "fast, and 1.13 times with add in products. Against torch's zero-bubble schedules rrfp's "
        "best is 1.42 and 1.44 ahead in A, 2.2 in C, 2.3 in D. Compiled (B), both sides' 1F1B are "
        "equal, two stages per rank gain 1 %, and readiness and split backwards cost up to 4 %. "
        "Both GPUs are at their power limit in A and B."),
    "gpu_lengths.json": (
        "Lengths that vary, on two GPUs",
        "One sequence a microbatch, whose length varies by 0.4 of the mean; speed-up over the "
        "fixed order. Both GPUs are at their power limit all the time: the fuller a schedule keeps "
        "them, the lower their clock and the slower every task, which takes back a quarter to a "
        "half of what is gained. `simulated, in run` is the simulated world with tasks as slow as "
        "the kernels of that very run were; the runtime is 0 to 5 % behind it."),
    "gpu_gemm_slowdown.json": (
        "Matrix products beside messages",
        "What a steady stream of 16 MiB messages from one GPU to the other costs bf16 products on "
        "both."),
    "gpu_free_sms.json": (
        "SMs left free for NCCL",
        "`RRFP_FREE_SMS` on one GPU: what bf16 products cost that leave so many multiprocessors "
        "free, and how long a message of NCCL's takes beside them, from a GPU to itself "
        "(between two: [below](#correctness-runs-on-two-gpus)). 8 are enough for a small message "
        "to begin at once, and cost 11 to 16 %; 32 cost a quarter."),
    "gpu_jitter.json": (
        "Jitter and look-ahead on a GPU",
        "Eight ranks as threads of one process on one GPU, 32 microbatches, tasks that are waiting "
        "kernels: F 5 ms, B 10, lengthened at random from J1 to J3 as the paper has it. Speed-up "
        "over `1f1b slack=0` of the same round, beside the simulated one; all at limit P, `auto` "
        "just in time and with both other settings of `lookahead`, which are 1 to 4 % slower, at "
        "J1 as fast. At this memory the gain is the split's: `auto split` is 4 to 5 % behind fixed "
        "`zb-h1` at J0 and J1, and 1 and 3 % ahead at J2 and J3. The ranks share one interpreter, "
        "to which a part of what is simulated is lost; the last column says how late a thread gets "
        "it. Processes do not pay that."),
    "gpu_arrival.json": (
        "How soon an idle worker starts what arrives on its GPU",
        "The stages of one operation of *What rrfp costs per task*, one on each of two GPUs, the "
        "second's worker idle for 3 ms. Where the first stage's GPU is late, which is the usual, "
        "the second's stage function has been called long before, and its first kernel starts 19 "
        "us after the result is computed, the copy included. Where the first stage's host is late, "
        "it takes Python's way from a claim to the stage function, on a processor that any idle "
        "time makes cold: without rrfp, a call of such a stage takes 32 us there, and 108 after a "
        "sleep of 3 ms."),
    "gpu_first_step.json": (
        "The first steps on two GPUs",
        "Kept as history: how far an early version was behind torch's 1F1B. Idle workers that "
        "slept were not the cause."),
    "gpu_breadth.json": (
        "Correctness runs on two GPUs",
        "Which tests ran there, what failed, and why; and a few figures that belong to no table."),
    "suite_runs.json": (
        "The suite many times",
        "Each file of tests on one core alone, or crowded, with another seed in every run; whole "
        "runs of the suite beside other work. What failed was explained and mended, not run again."
        " A run of the suite is 70 files at first, 86 in the end."),
    "soak.json": (
        "A long run",
        "Four processes: descriptors, threads and memory do not grow."),
    "policy_table.json": (
        "The simulated world",
        "Speed-up over fixed ZB-H1, geometric mean of nine models of variability, messages out of "
        "order, by in-flight limit and microbatch order. Rows with `split` or ZB split the "
        "backward. A function of the code and the seeds, so it names no processor, card or commit; "
        "`policy_table --json FILE` writes it."),
    "step_draws.jsonl": (
        "Drawn steps as data",
        "Twelve models, three seeds each, with every duration: what nine policies make of them. "
        "A function of the code and the seeds too; `step_draws` writes it, and a test replays it."),
}


def _read(name):
    text = (RESULTS / name).read_text()
    return [json.loads(line) for line in text.splitlines()] if name.endswith("l") else (
        json.loads(text))


def origin(recorded):
    """Machine or card, software, commit and command of a recorded file; "" where it names none."""
    if not isinstance(recorded, dict):
        return ""
    command = f", `{recorded['command']}`" if "command" in recorded else ""
    if "machine" not in recorded:
        commit = recorded["commit"]
        commit = commit[:10] + commit[40:] if re.match(r"[0-9a-f]{40}", commit) else commit
        return f"{recorded['card']}; {recorded['software']}; commit: {commit}{command}"
    machine = recorded["machine"]
    changed = " with uncommitted changes" if recorded["uncommitted_changes"] else ""
    priority = ", at real-time priority" if recorded.get("real_time_priority") else ""
    card = recorded["results"].get("device", "cpu")
    card = "" if card == "cpu" else f", {card}"
    note = f". {recorded['note'].rstrip('.')}" if "note" in recorded else ""
    return (f"{machine['processor']}, {machine['cores']} cores{card}, load average "
            f"{machine['load_average'][0]:.1f}{priority}, torch {machine['torch']}, commit "
            f"{recorded['commit'][:10]}{changed}{command}{note}")


def details():
    """The part of docs/benchmarks.md between the marks: a section for each file."""
    parts = []
    for name, (title, about) in ABOUT.items():
        recorded = _read(name)
        writer = name.partition(".")[0]
        for variant in ("_balanced", "_32_cores", "_cuda", "_throttled", "_h100"):
            writer = writer.removesuffix(variant)
        is_record = isinstance(recorded, dict) and "results" in recorded
        body = getattr(tables, writer)(recorded["results"] if is_record else recorded)
        source = "; ".join(filter(None, (origin(recorded),
                                         f"[{name}](../benchmarks/results/{name})")))
        parts.append(f"## {title}\n\n{about}\n\n{body}\n\n({source})\n")
    return "\n".join(parts)


# A row of README.md's table -> its `hint`, `microbatch_order` and `max_in_flight`, and what the
# result files call it.
FIXED = '`"1f1b"`, `slack=0`'
CONFIGURATIONS = {
    (FIXED, "given", "P"): ("1f1b slack 0", "1f1b slack=0"),
    (FIXED, '`"mid"`', "P"): ("1f1b slack 0, mid", "1f1b slack=0, mid"),
    ('`"auto"`', "given", "P"): ("auto", "auto, P"),
    ('`"auto"`', '`"mid"`', "P"): ("auto, mid", "auto, mid, P"),
    ('`"auto"`', "given", "2P"): ("auto", "auto, 2P"),
    ('`"auto"`', '`"mid"`', "2P"): ("auto, mid", "auto, mid, 2P"),
}
SCHEDULES = {(FIXED, "given", "P"): "rrfp 1f1b slack=0", ('`"auto"`', "given", "P"): "rrfp auto",
             ('`"auto"`', "given", "2P"): "rrfp auto 2P"}


def _speed_ups(results):
    """Of a readiness file, by configuration."""
    found = {(row["variant"], row["limit"]): row["speed_up"] for row in results["table"]}
    return {key: f"{found[variant, key[2]]:.2f}" for key, (variant, _) in CONFIGURATIONS.items()}


def _simulated_speed_ups(part):
    found = {(s["policy"], s["limit_over_ranks"]): s for s in part["speed_ups"]}

    def speed_up(hint, order, limit):
        policy = "fixed 1F1B" if hint == FIXED else "auto"
        return found[policy, {"P": 1.0, "2P": 2.0}[limit]][order.strip('`"')][1]

    return {key: f"{speed_up(*key):.2f}" for key in CONFIGURATIONS}


def _gpu_lengths_speed_ups(results):
    def ratios(run):
        return [row["ratio"] for row in results["rows"] if row.get("run") == run]

    # Three digits, as docs/benchmarks.md has them: with two, what differs by less than .001 here
    # would look .01 apart.
    return {key: f"{tables.geometric_mean(ratios(run)):.3f}"
            for key, (_, run) in CONFIGURATIONS.items()}


def _gpu_speed_ups(study):
    """Over the fixed order, by run, where the GPU decides and not the host."""
    found = {step["run"]: step["median_ms"] for step in study["runs"][0]["steps"]}
    return {run: f"{found['rrfp 1f1b slack=0'] / ms:.2f}" for run, ms in found.items()}


def _same_memory():
    """With `mid` and twice the memory: a fixed order's speed-up, that of `auto`; and what `auto`
    adds where messages are late."""
    rows = {row["case"]: row["runs"] for row in _read("same_memory.json")["results"]["rows"]}
    lengths = [rows["lengths vary by 0.4"][f"{run}, mid"]["speed_up"]
               for run in ("fixed, twice the warm-up", "auto, twice the limit")]
    late = rows["equal tasks, late messages"]
    added = (late["auto, twice the limit"]["speed_up"]
             / late["fixed, twice the warm-up"]["speed_up"])
    return [f"{each:.2f}" for each in lengths] + [f"{100 * (added - 1):.0f} %"]


def _torchs_leads(study):
    """How many times as fast torch's 1F1B is, at worst, in the cases but the first: by run."""
    cases = [{step["run"]: step["median_ms"] for step in run["steps"]} for run in study["runs"][1:]]
    leads = {}
    for found in cases:
        for run, ms in found.items():
            leads[run] = max(leads.get(run, 0.0), ms / found["torch 1F1B"])
    return {run: f"{lead:.2f}" for run, lead in leads.items()}


def _speed_up_table():
    """Of README.md: a row per configuration, a column per benchmark."""
    schedules = _gpu_speed_ups(_read("gpu_schedules.json")["results"])
    columns = {
        "tasks sleep": _speed_ups(_read("readiness_balanced.json")["results"]),
        "last stage slowest": _speed_ups(_read("readiness.json")["results"]),
        "simulated": _simulated_speed_ups(_read("policy_table.json")[0]),
        "GPT, lengths vary": _gpu_lengths_speed_ups(_read("gpu_lengths.json")["results"]),
        "GPT, equal lengths": {key: schedules[run] for key, run in SCHEDULES.items()},
    }
    return tables.table(
        ["`hint`", "`microbatch_order`", "`max_in_flight`", *columns],
        [[*key, *(found.get(key, "") for found in columns.values())] for key in CONFIGURATIONS])


def summary():
    """The part of README.md between the marks."""
    ranks = _read("policy_table.json")[0]["ranks"]
    schedules = _read("gpu_schedules.json")["results"]
    gpu = _gpu_speed_ups(schedules)
    control = _same_memory()
    torchs, zbv = gpu["torch 1F1B"], gpu["rrfp zbv V=2"]
    leads = _torchs_leads(schedules)
    lead, lead_2p, lead_split, lead_zbv, lead_products = (leads[f"rrfp {run}"] for run in (
        "auto", "auto 2P", "auto split", "zbv V=2", "zbv V=2, add in products"))
    in_products = gpu["rrfp zbv V=2, add in products"]
    return f"""\
Speed-up over the fixed 1F1B order of rrfp itself (the first row), whose messages go the same way.
A row is one setting of three arguments; everything else is at its default. P is the number of
ranks, which is the default limit. The guard has no part in it: a setting ran for fewer than nine
steps on end.

{_speed_up_table()}

*Tasks sleep*: four processes, lengths vary, stages equally heavy; *last stage slowest*: the same
with one stage that all others wait for. *Simulated*: {ranks} ranks, geometric mean of nine
models of variability. *GPT*: the one real model, on two GPUs; where lengths are equal, `mid`
changes nothing.

Memory and the order of microbatches give most of this. A fixed 1F1B order that begins with twice
as many forwards, with `mid`, comes to {control[0]} where `auto` with both comes to {control[1]}
(simulated, 8 ranks, lengths vary by 0.4 of their mean; the table has the mean of nine models, of
other kinds too). To what a fixed order with the same memory can do readiness adds 1 to 4 % where
tasks vary and {control[2]} where messages are late
([apart](docs/benchmarks.md#readiness-memory-and-the-order-of-microbatches-apart)).

In the last column torch's own 1F1B comes to {torchs}; hint `zbv` (two stages per rank, backwards
[split in two](docs/concepts.md#split-backward)) to {zbv}, and to {in_products} with
`add_in_products` (matrix products that add to `.grad` themselves): ranks that are idle for less
time while the pipeline fills and drains, and cheaper products, not readiness.

**Losses to torch.** That column is case A of
[four](docs/benchmarks.md#schedules-beside-torchs-on-two-gpus). In the other three torch's 1F1B is,
at worst, {lead} times as fast as `auto` ({lead_2p} at twice the limit), {lead_split} as `auto` with
split backwards, {lead_zbv} as `zbv` and {lead_products} as `zbv` with `add_in_products`. B is A
with its transformer blocks under `torch.compile`. C and D have one sequence a microbatch, not two,
D on a slower processor: tasks so short that the host takes as long to launch their kernels as the
GPU to run them, and the more tasks a step has, the more there is to launch; `zbv` has most.

{textwrap.fill(tables.host_cost_sentence(), 100, break_on_hyphens=False)}
Commands, machines, quartiles, the other schedules and what went wrong:
[docs/benchmarks.md](docs/benchmarks.md).
"""


def page(text, section):
    """`text` of a page with `section` between its marks."""
    marked = re.compile(re.escape(BEGIN) + ".*?" + re.escape(END), re.DOTALL)
    if len(marked.findall(text)) != 1:
        raise SystemExit("the page must hold the two marks of the measured section once")
    return marked.sub(lambda _: BEGIN + section + END, text)


PAGES = {"README.md": summary, "docs/benchmarks.md": details}

if __name__ == "__main__":
    for name, section in PAGES.items():
        file = ROOT / name
        file.write_text(page(file.read_text(), section()))
