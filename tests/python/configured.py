"""CMake's configure step of the project, in a folder of a test's own."""

import shutil
import subprocess
import sys
from pathlib import Path

import pybind11

ROOT = Path(__file__).resolve().parents[2]


def cmake():
    """The one that the build itself takes: of this interpreter, else from PATH."""
    beside = Path(sys.executable).parent / "cmake"
    found = str(beside) if beside.exists() else shutil.which("cmake")
    assert found, f"cmake was not found; run {sys.executable} -m pip install cmake"
    return found


def configure(folder, *options, env=None):
    """The ended process of cmake, with its output."""
    return subprocess.run(
        [cmake(), "-S", str(ROOT), "-B", str(folder), f"-DPython_EXECUTABLE={sys.executable}",
         f"-Dpybind11_DIR={pybind11.get_cmake_dir()}", *options],
        capture_output=True, text=True, env=env)
