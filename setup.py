"""Builds rrfp/_C by running CMake once; everything else is in pyproject.toml.

CMake knows how to build the project and setuptools does not, so the one Extension below has no
sources: it only tells setuptools that the wheel is not pure Python. The build folder is kept
(build/<python tag>), so a second install compiles what changed and nothing else.

RRFP_CMAKE_ARGS  more arguments for CMake's configure step, separated by blanks
"""

import fcntl
import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent


def build_tool(name):
    """The tool from this interpreter's package of that name, else from PATH.

    The package comes first: pip without an activated environment has the package's version
    checked against pyproject.toml, while PATH may hold an older one.
    """
    spec = importlib.util.find_spec(name)
    if spec and spec.submodule_search_locations:
        module = importlib.import_module(name)
        folder = getattr(module, "CMAKE_BIN_DIR", None) or getattr(module, "BIN_DIR", None)
        if folder and (Path(folder) / name).exists():
            return str(Path(folder) / name)
    found = shutil.which(name)
    if found is None:
        raise SystemExit(f"rrfp: {name} is needed to build and was not found; "
                         f"run {sys.executable} -m pip install {name}")
    return found


def pybind11_folder():
    """The folder of pybind11's package for CMake; empty leaves the search to pybind11.cmake."""
    if importlib.util.find_spec("pybind11") is None:
        return ""
    return importlib.import_module("pybind11").get_cmake_dir()


class CMakeBuild(build_ext):
    def build_extension(self, ext):
        target = Path(self.get_ext_fullpath(ext.name)).resolve()
        build = ROOT / "build" / sys.implementation.cache_tag
        build.mkdir(parents=True, exist_ok=True)
        # Paths of tools are given each time: those of an isolated build are gone afterwards,
        # and the kept cache would name them.
        configure = [
            build_tool("cmake"), "-S", str(ROOT), "-B", str(build), "-G", "Ninja",
            f"-DCMAKE_MAKE_PROGRAM={build_tool('ninja')}",
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-Dpybind11_DIR={pybind11_folder()}",
            f"-DCMAKE_BUILD_TYPE={'Debug' if self.debug else 'Release'}",
            "-DRRFP_BUILD_PYTHON=ON",
        ]
        configure += shlex.split(os.environ.get("RRFP_CMAKE_ARGS", ""))
        jobs = ["-j", str(self.parallel)] if self.parallel else []
        with open(build / "in-use", "w") as lock:  # the C++ tests are built here as well
            fcntl.flock(lock, fcntl.LOCK_EX)
            subprocess.run(configure, check=True)
            subprocess.run([build_tool("cmake"), "--build", str(build), "--target", "_C", *jobs],
                           check=True)
        built = list(build.glob("_C*.so"))
        if len(built) != 1:
            raise SystemExit(f"rrfp: expected one _C*.so in {build}, found {len(built)}; "
                             "remove that folder and build again")
        target.parent.mkdir(parents=True, exist_ok=True)
        # A running process may have the old file mapped: replaced, never written into.
        fresh = target.with_suffix(".new")
        shutil.copy2(built[0], fresh)
        os.replace(fresh, target)


setup(ext_modules=[Extension("rrfp._C", sources=[])], cmdclass={"build_ext": CMakeBuild})
