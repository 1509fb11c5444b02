"""Every fault in every phase: what each rank reported, and how soon.

A cell is one job of 2 to 4 processes. Run as a script it runs all of them and writes the table of
docs/errors.md:

    python tests/distributed/fault_matrix.py
"""

import signal
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from launch import Job

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/errors.md"
BEGIN, END = "<!-- faults: begin -->\n", "<!-- faults: end -->\n"
M = 6
BOUND_S = 20.0  # from the fault to the last rank's error, on a busy machine
PEER_TIMEOUT_S = 4  # for faults that only silence tells
SLOTS = 2  # jobs at once: they wait most of the time

# Where a phase is: (step, microbatch) of 1F1B in fixed order.
PHASES = {
    "set-up": (0, 0),
    "warm-up": (1, 0),
    "steady": (1, 2),
    "cool-down": (1, M - 1),
    "between steps": (1, 0),
}


@dataclass(frozen=True)
class Fault:
    """deed and point: see rank_faults.py. told: what the other ranks raise; own: what becomes of
    the rank itself: an exception's name, "killed", "frozen" or None for the same as the others."""

    name: str
    deed: str
    points: tuple  # by phase of `phases`
    phases: tuple
    told: str
    own: str | None = None
    is_last: bool = False   # on the rank of the loss
    is_split: bool = False
    is_grouped: bool = False  # in agreement groups alone
    plan: tuple = ()
    environment: tuple = ()


EVERYWHERE = ("set-up", "warm-up", "steady", "cool-down", "between steps")
IN_TASKS = ("warm-up", "steady", "cool-down")
OUTSIDE_AND_IN = ("setup", "F", "B", "B", "between")
SILENT = (("RRFP_PEER_TIMEOUT_S", str(PEER_TIMEOUT_S)),)
FAULTS = [
    Fault("exception in F", "raise", ("F",) * 2, ("warm-up", "steady"), "StageError"),
    Fault("exception in B", "raise", ("B",) * 3, IN_TASKS, "StageError"),
    Fault("exception in I", "raise", ("B",) * 3, IN_TASKS, "StageError", is_split=True),
    Fault("exception in W", "raise", ("W",) * 3, IN_TASKS, "StageError", is_split=True),
    Fault("exception in the loss", "raise", ("loss",) * 3, IN_TASKS, "StageError", is_last=True),
    Fault("exception in a hook", "raise", ("hook",) * 3, IN_TASKS, "StageError"),
    Fault("MemoryError in F", "memory", ("F",) * 2, ("warm-up", "steady"), "StageError"),
    Fault("torch out of memory in B", "allocator", ("B",) * 3, IN_TASKS, "StageError"),
    Fault("no memory to receive", "starve", ("F", "B"), ("warm-up", "steady"), "StageError",
          plan=(("width", 4096), ("microbatches", 3), ("microbatch", 0))),
    Fault("shared memory full", "fill", ("setup",), ("set-up",), "ValueError", is_grouped=True),
    Fault("kill -9", "kill", OUTSIDE_AND_IN, EVERYWHERE, "PeerLostError", "killed"),
    Fault("frozen (SIGSTOP)", "freeze", OUTSIDE_AND_IN[1:], EVERYWHERE[1:], "PeerLostError",
          "frozen", environment=SILENT),
    Fault("stopped for a second", "pause", OUTSIDE_AND_IN, EVERYWHERE, "nothing", "nothing"),
    Fault("connections cut", "cut", ("F", "B", "B", "between"), EVERYWHERE[1:], "PeerLostError"),
    Fault("Ctrl-C", "interrupt", OUTSIDE_AND_IN[1:4], IN_TASKS, "InterruptedStepError",
          "KeyboardInterrupt"),
    Fault("SIGTERM", "terminate", OUTSIDE_AND_IN, EVERYWHERE, "PeerLostError", "terminated"),
    Fault("sys.exit()", "exit", ("F", "B", "B"), IN_TASKS, "StageError"),
    Fault("never comes", "absent", ("between",), ("between steps",), "RankTimeoutError", "absent",
          plan=(("stall_timeout_s", 3.0),)),
    Fault("leaves", "leave", ("between",), ("between steps",), "ClosedError", "left"),
]


@dataclass(frozen=True)
class Cell:
    fault: Fault
    phase: str
    num_ranks: int
    is_grouped: bool

    @property
    def name(self):
        ranks = "2 x 2 in agreement" if self.is_grouped else str(self.num_ranks)
        return f"{self.fault.name}, {self.phase}, {ranks}"

    @property
    def victim(self):
        return self.num_ranks - 1 if self.fault.is_last else self.num_ranks // 2

    def plan(self):
        fault = self.fault
        step, microbatch = PHASES[self.phase]
        point = fault.points[fault.phases.index(self.phase)]
        options = {"hint": "1f1b", "slack": 0}
        if fault.is_split:
            options = {"hint": "zb-h1", "slack": 0, "split_backward": True}
        # What happens before there is a connection, only time tells.
        patience = {"stall_timeout_s": 6.0} if self.fails_set_up else {}
        return {
            "mode": "processes", "num_ranks": self.num_ranks, "fault": f"{fault.deed}-{point}",
            "rank": self.victim, "step": step, "microbatch": microbatch, "microbatches": M,
            "group": self.is_grouped, "options": options, **patience, **dict(fault.plan),
        }

    @property
    def fails_set_up(self):
        return self.phase == "set-up" and self.fault.told == "PeerLostError"

    def expected(self, rank):
        fault = self.fault
        if rank == self.victim and fault.own:
            return fault.own
        return "RankTimeoutError" if self.fails_set_up else fault.told


def cells():
    """Each fault in each phase: by turns on 2, 3 and 4 ranks, and in an agreement group."""
    found, number = [], 0
    for fault in FAULTS:
        for phase in fault.phases:
            shapes = [(2, False), (3, False), (4, False), (4, True)]
            if fault.is_grouped:
                found.append(Cell(fault, phase, *shapes[-1]))
                continue
            for shift in (0, 2):
                found.append(Cell(fault, phase, *shapes[(number + shift) % 4]))
            number += 1
    return found


def reported(cell, rank, end):
    """(what became of a rank, seconds after the fault or None)."""
    (fault,) = [e for e in cell.events if e["event"] == "fault"]
    if end is None:
        return ("absent" if cell.cell.fault.deed == "absent" else "frozen"), None
    if end.error:
        return end.error["type"], end.error["time_s"] - fault["time_s"]
    if end.event("interrupted") and end.exit_code != 0:
        return "KeyboardInterrupt", None
    codes = {-signal.SIGKILL: "killed", -signal.SIGTERM: "terminated"}
    if end.exit_code in codes:
        return codes[end.exit_code], None
    return ("nothing" if end.event("done") else "left"), None


class Running:
    """A cell under way."""

    def __init__(self, cell):
        self.cell = cell
        self.job = Job(cell.plan(), dict(cell.fault.environment))

    def finish(self):
        """[(what, seconds)] by rank; AssertionError where it is not what is expected."""
        cell, job = self.cell, self.job
        is_left = cell.fault.own in ("frozen", "absent")
        waited = [r for r in range(cell.num_ranks) if not (is_left and r == cell.victim)]
        with job:
            ends = dict(zip(waited, job.finish(ranks=waited)))
            self.events = [e for rank in range(job.count) for e in job.events(rank)]
            told = [reported(self, rank, ends.get(rank)) for rank in range(cell.num_ranks)]
            orphans = [rank for rank in job.orphans() if rank in waited]
            transcript = f"{cell.name}: {told}\n{job.transcript()}"
        for rank, (what, after_s) in enumerate(told):
            assert what == cell.expected(rank), f"rank {rank}: {transcript}"
            assert after_s is None or after_s < BOUND_S, f"rank {rank}: {transcript}"
        for rank, end in ends.items():
            self._check_error(rank, end.error, transcript)
            left = end.event("left over") or {}
            for what in ("connections", "threads", "segments"):
                assert not left.get(what), f"rank {rank} has kept {what}: {transcript}"
        assert not orphans, transcript
        return told

    def _check_error(self, rank, error, transcript):
        if error is None:
            return
        assert error["untouched"], f"rank {rank} has other parameters: {transcript}"
        if rank == self.cell.victim and self.cell.fault.deed == "cut":
            return  # it has lost the others, and names one of them
        is_named = f"rank {self.cell.victim}" in error["text"] or self.cell.is_grouped
        assert is_named, f"rank {rank}: {transcript}"


def run(some):
    """{cell: told}, a few jobs at a time."""
    waiting, running, told = list(some), [], {}
    try:
        while waiting or running:
            while waiting and len(running) < SLOTS:
                running.append(Running(waiting.pop(0)))
            first = running.pop(0)
            told[first.cell] = first.finish()
            yield first.cell, told[first.cell]
    finally:
        for left in running:
            left.job.__exit__()


def row(cell, told):
    """A line of the table."""
    kinds = Counter(what for rank, (what, _) in enumerate(told) if rank != cell.victim)
    others = ", ".join(kinds)
    slowest = [after_s for _, after_s in told if after_s is not None]
    own, _ = told[cell.victim]
    ranks = "2 x 2" if cell.is_grouped else str(cell.num_ranks)
    time = f"{max(slowest):.2f}" if slowest else ""
    return f"| {cell.fault.name} | {cell.phase} | {ranks} | {own} | {others} | {time} |\n"


def expected_rows():
    """The table without its times."""
    for cell in cells():
        told = [(cell.expected(rank), None) for rank in range(cell.num_ranks)]
        yield row(cell, told)


HEAD = (
    "| fault | phase | ranks | the rank itself | the others | s |\n"
    "|---|---|---|---|---|---|\n"
)


def main():
    rows = []
    for cell, told in run(cells()):
        rows.append(row(cell, told))
        print(rows[-1], end="", flush=True)
    text = PAGE.read_text()
    before, after = text.split(BEGIN)[0], text.split(END)[1]
    PAGE.write_text(before + BEGIN + HEAD + "".join(rows) + END + after)


if __name__ == "__main__":
    sys.exit(main())
