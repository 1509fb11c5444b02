"""CMake's configure step of the project, in a folder of a test's own."""

import shutil
import subprocess
import sys
from pathlib import Path

import pybind11

ROOT = Path(__file__).resolve().parents[2]


def configure(folder, *options, env=None):
    """The ended process of cmake, with its output."""
    cmake = Path(sys.executable).parent / "cmake"
    cmake = str(cmake) if cmake.exists() else shutil.which("cmake")
    assert cmake, f"cmake was not found; run {sys.executable} -m pip install cmake"
    return subprocess.run(
        [cmake, "-S", str(ROOT), "-B", str(folder), f"-DPython_EXECUTABLE={sys.executable}",
         f"-Dpybind11_DIR={pybind11.get_cmake_dir()}", *options],
        capture_output=True, text=True, env=env)
