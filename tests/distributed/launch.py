"""Starts real processes for one fault, watches them, and cleans up whatever they leave.

A job is ``fault_rank.py`` on P processes (or one process with all stages), forked from a process
that has torch imported and nothing else. Each prints events as JSON lines; ``Job.finish()``
returns them with the exit codes, or fails with everybody's output when the job is not over in
time.
"""

import functools
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from free_port import free_port

SCRIPT = Path(__file__).with_name("fault_rank.py")


@dataclass
class RankEnd:
    """How one process ended. ``events`` are the dictionaries it printed, in order."""

    exit_code: int
    events: list
    stderr: str

    def event(self, name):
        return next((e for e in self.events if e["event"] == name), None)

    @property
    def error(self):
        return self.event("error")


class Rank:
    """A forked process; like Popen as far as the tests need it."""

    def __init__(self, source, pid):
        self.source = source
        self.pid = pid

    def poll(self):
        self.source.read()
        return self.source.codes.get(self.pid)

    def wait(self, timeout_s=30.0):
        """Its exit code (negative: the signal), or None when it has not ended in time."""
        deadline = time.monotonic() + timeout_s
        while self.poll() is None and time.monotonic() < deadline:
            self.source.read(max(0.0, deadline - time.monotonic()))
        return self.poll()


class ForkSource:
    """The process from which all ranks are forked."""

    def __init__(self):
        self.codes = {}
        self.started = []
        self.process = subprocess.Popen(
            [sys.executable, "-X", "faulthandler", str(SCRIPT)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        self.rest = b""

    def read(self, timeout_s=0.0):
        """Takes in what it has said, waiting for at most that long."""
        while select.select([self.process.stdout], [], [], timeout_s)[0]:
            timeout_s = 0.0
            data = os.read(self.process.stdout.fileno(), 65536)
            if not data:
                raise AssertionError("the process that forks the ranks has ended")
            *lines, self.rest = (self.rest + data).split(b"\n")
            for line in map(json.loads, lines):
                if "started" in line:
                    self.started.append(line["started"])
                else:
                    self.codes[line["ended"]] = line["code"]

    def fork(self, **request):
        self.process.stdin.write((json.dumps(request) + "\n").encode())
        while not self.started:
            self.read(60.0)
        return Rank(self, self.started.pop())


@functools.cache
def fork_source():
    return ForkSource()


class Job:
    """Processes of one plan; use as a context manager, so that none survives the test."""

    def __init__(self, plan, environment=None):
        self.plan = plan
        self.count = 1 if plan["mode"] == "threads" else plan["num_ranks"]
        self.folder = tempfile.TemporaryDirectory(prefix="rrfp-fault-")
        port = str(free_port())
        self.processes = []
        for rank in range(self.count):
            variables = {
                "RANK": str(rank),
                "WORLD_SIZE": str(self.count),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
                **(environment or {}),
            }
            paths = {kind: str(self.path(rank, kind)) for kind in ("out", "err")}
            for path in paths.values():
                Path(path).touch()
            self.processes.append(fork_source().fork(plan=plan, environment=variables, **paths))

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        for process in self.processes:
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            process.wait()
            process.source.codes.pop(process.pid, None)  # a later rank may get this number
        self.folder.cleanup()

    def path(self, rank, kind):
        return Path(self.folder.name, f"{rank}.{kind}")

    def events(self, rank):
        lines = self.path(rank, "out").read_text().splitlines()
        return [json.loads(line) for line in lines if line.startswith("{")]

    def wait_for(self, rank, name, timeout_s=60.0):
        """The first event of that name of the rank."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            for event in self.events(rank):
                if event["event"] == name:
                    return event
            if self.processes[rank].poll() is not None:
                break
            time.sleep(0.02)
        raise AssertionError(f"rank {rank} never said {name!r}\n{self.transcript()}")

    def send(self, rank, number):
        os.kill(self.processes[rank].pid, number)

    def transcript(self):
        return "\n".join(
            f"--- rank {rank}, exit {process.poll()}\n{self.path(rank, 'out').read_text()}"
            f"{self.path(rank, 'err').read_text()[-6000:]}"
            for rank, process in enumerate(self.processes)
        )

    def finish(self, timeout_s=60.0, ranks=None):
        """RankEnd of every process (of ``ranks``); AssertionError with stacks when late."""
        ranks = range(self.count) if ranks is None else ranks
        deadline = time.monotonic() + timeout_s
        for rank in ranks:
            if self.processes[rank].wait(max(0.01, deadline - time.monotonic())) is None:
                for process in self.processes:
                    if process.poll() is None:
                        os.kill(process.pid, signal.SIGABRT)  # faulthandler prints all stacks
                time.sleep(1.0)
                raise AssertionError(
                    f"rank {rank} has not ended after {timeout_s} s\n{self.transcript()}"
                )
        return [
            RankEnd(self.processes[r].poll(), self.events(r), self.path(r, "err").read_text())
            for r in ranks
        ]

    def orphans(self):
        """Ranks whose session still has a process although the rank itself has ended."""
        left = []
        for rank, process in enumerate(self.processes):
            try:
                os.killpg(process.pid, 0)
                left.append(rank)
            except ProcessLookupError:
                pass
        return left


def run_job(plan, timeout_s=60.0):
    """Runs the plan to its end: (list of RankEnd, ranks that left orphans, all output)."""
    with Job(plan) as job:
        ends = job.finish(timeout_s)
        return ends, job.orphans(), job.transcript()
