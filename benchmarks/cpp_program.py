"""Builds a benchmark in C++, runs it, and counts its instructions under valgrind's callgrind."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def tool(name, remedy):
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    if not found:
        sys.exit(f"{name} was not found; {remedy}")
    return found


def run(*command):
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(
            f"{' '.join(map(str, command))} ended with {done.returncode}:\n"
            f"{done.stdout[-3000:]}{done.stderr[-3000:]}"
        )
    return done


def build(folder, name):
    cmake = tool("cmake", "run python -m pip install cmake ninja")
    run(cmake, "-S", ROOT, "-B", folder, "-DRRFP_BUILD_PYTHON=OFF", "-DRRFP_BUILD_TESTS=ON")
    run(cmake, "--build", folder, "--target", name, "--parallel", os.cpu_count())
    return folder / name


def instructions_per_call(valgrind, inside, program, *arguments):
    """Instructions inside the functions whose names match ``inside``, by the number it prints."""
    done = run(
        valgrind,
        "--tool=callgrind",
        "--callgrind-out-file=/dev/null",
        f"--toggle-collect={inside}",
        program,
        *arguments,
    )
    collected = re.search(r"Collected : (\d+)", done.stderr)
    return round(int(collected.group(1)) / int(done.stdout), 1)
