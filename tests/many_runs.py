"""The suite many times, each file on one core alone or crowded: does any test flake?

    python tests/many_runs.py [--runs 20] [--cores 0-15] [--jobs-per-core 1] [--skip FILE ...]
        [--limit-s 3000] [--first-seed N] [--out FOLDER]

Every run takes another seed. A file of tests is a pytest of its own, pinned to one core, which so
many others share; half of the runs begin with their last file, so that neighbours differ. Where
`unshare` may be used, each has a network, a /dev/shm and process numbers of its own, as it has on a
machine that runs one suite: nobody takes its ports. What failed is printed as it ends, with its
text in FOLDER; the last lines say which files were not run in time.
"""

import argparse
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# Begins a command in new namespaces: shared memory of its own, and the loopback device up, for
# which there may be no program (SIOCSIFFLAGS, IFF_UP | IFF_RUNNING).
ALONE = """
import fcntl, os, socket, struct, subprocess, sys
subprocess.run(["mount", "-t", "tmpfs", "tmpfs", "/dev/shm"], check=True)
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
    fcntl.ioctl(any_socket, 0x8914, struct.pack("16sH14x", b"lo", 0x41))
os.execvp(sys.argv[1], sys.argv[1:])
"""
NO_TESTS = 5  # pytest's exit status where all are deselected


def cores_of(text):
    """{3, 4, 5, 9} of "3-5,9"."""
    found = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    return found


def isolation():
    """The words before a command that give it a machine of its own, as far as that goes."""
    words = ["unshare", "--mount", "--net", "--pid", "--fork", "--kill-child", "--mount-proc",
             sys.executable, "-c", ALONE]
    done = subprocess.run([*words, "true"], capture_output=True, check=False)
    if done.returncode == 0:
        return words
    print("unshare is not allowed here: ports and /dev/shm are shared", flush=True)
    return []


def files_of(skipped):
    """Test files, relative to the root; those that only GPUs can run are empty here."""
    found = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*.py"))
    return [name for name in found if not any(word in name for word in skipped)]


class Runs:
    """Jobs (run, file) and what became of them."""

    def __init__(self, jobs, out, limit_s, first_seed):
        self.jobs = queue.SimpleQueue()
        for job in jobs:
            self.jobs.put(job)
        self.out, self.end = out, time.monotonic() + limit_s
        self.words, self.first_seed = isolation(), first_seed
        self.failed, self.cut, self.num_done = [], [], 0
        self.took_s = {}
        self._lock = threading.Lock()

    def work(self, core):
        """Run jobs on one core until there are none."""
        while True:
            try:
                run, name = self.jobs.get_nowait()
            except queue.Empty:
                return
            self._one(core, run, name)

    def _one(self, core, run, name):
        log = self.out / f"{run}-{Path(name).stem}.log"
        left_s = self.end - time.monotonic()
        if left_s < 1:
            self.cut.append((run, name))
            return
        began = time.monotonic()
        with open(log, "w") as file, tempfile.TemporaryDirectory() as folder:
            command = [*self.words, sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider",
                       "--basetemp", f"{folder}/tests", name]
            try:
                done = subprocess.run(
                    command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, timeout=left_s,
                    preexec_fn=lambda: os.sched_setaffinity(0, {core}), check=False,
                    env={**os.environ, "RRFP_SEED": str(self.first_seed + run),
                         "OMP_NUM_THREADS": "1"},
                )
                status = done.returncode
            except subprocess.TimeoutExpired:
                self.cut.append((run, name))
                return
        took_s = time.monotonic() - began
        with self._lock:
            self.num_done += 1
            self.took_s[name] = max(took_s, self.took_s.get(name, 0))
        if status in (0, NO_TESTS):
            log.unlink()
            return
        self.failed.append((run, name))
        lines = [line for line in log.read_text(errors="replace").splitlines()
                 if line.startswith(("FAILED", "ERROR"))]
        print(f"run {run}, core {core}, {took_s:.0f} s: {name} ended with {status}\n  "
              + "\n  ".join(lines[:8]), flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--cores", type=cores_of, default=os.sched_getaffinity(0))
    parser.add_argument("--jobs-per-core", type=int, default=1)
    parser.add_argument("--skip", nargs="*", default=[], help="parts of names of files")
    parser.add_argument("--limit-s", type=float, default=3000)
    parser.add_argument("--first-seed", type=int, default=20260518)
    parser.add_argument("--out", type=Path, default=None)
    arguments = parser.parse_args()
    out = arguments.out or Path(tempfile.mkdtemp(prefix="rrfp-many-runs-"))
    out.mkdir(parents=True, exist_ok=True)
    files = files_of(arguments.skip)
    jobs = [(run, name) for run in range(arguments.runs)
            for name in (files if run % 2 == 0 else reversed(files))]
    runs = Runs(jobs, out, arguments.limit_s, arguments.first_seed)
    threads = [threading.Thread(target=runs.work, args=(core,))
               for core in sorted(arguments.cores) for _ in range(arguments.jobs_per_core)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    longest = sorted(runs.took_s.items(), key=lambda item: -item[1])
    (out / "longest.txt").write_text("".join(f"{took_s:6.0f} s {name}\n"
                                             for name, took_s in longest))
    print("longest: " + ", ".join(f"{name} {took_s:.0f} s" for name, took_s in longest[:8]))
    print(f"{runs.num_done} of {len(jobs)} files run, {len(runs.failed)} failed, "
          f"{len(runs.cut)} cut off; {arguments.runs} runs of {len(files)} files, "
          f"{len(threads)} at a time on {len(arguments.cores)} cores; texts in {out}")
    if runs.cut:
        print(f"cut off: {sorted(runs.cut)[:20]}")
    return 1 if runs.failed or runs.cut else 0


if __name__ == "__main__":
    sys.exit(main())
