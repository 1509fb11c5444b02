"""What `pip install` makes of the sources: the wheel's content, and that a kept build folder is
used again."""

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from configured import cmake, configure

import rrfp

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("CMakeLists.txt", "pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE",
           "CHANGELOG.md", "csrc", "third_party", "rrfp")
UNREACHABLE = ("No matching distribution found", "Could not find a version",
               "Temporary failure in name resolution", "Failed to establish a new connection")


def declared_version():
    text = (ROOT / "pyproject.toml").read_text()
    return re.search(r'^version = "(.+)"$', text, re.MULTILINE).group(1)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel of a clean copy of the sources, built in isolation, as `pip install .` does."""
    folder = tmp_path_factory.mktemp("wheel")
    copy = folder / "rrfp-sources"
    copy.mkdir()
    leave = shutil.ignore_patterns("*.so", "__pycache__")
    for name in SOURCES:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, copy / name, ignore=leave)
        else:
            shutil.copy2(source, copy / name)
    # Not optimised, which takes half the time: how fast it runs is not the question here.
    arguments = f"{os.environ.get('RRFP_CMAKE_ARGS', '')} -DCMAKE_CXX_FLAGS_RELEASE=-O0"
    done = subprocess.run([sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir",
                           str(folder), str(copy)], capture_output=True, text=True,
                          env={**os.environ, "RRFP_CMAKE_ARGS": arguments})
    output = done.stdout + done.stderr
    if done.returncode and any(sign in output for sign in UNREACHABLE):
        pytest.skip("an isolated build needs the package index, which did not answer")
    assert done.returncode == 0, output[-6000:]
    (built,) = folder.glob("rrfp-*.whl")
    return built


@pytest.mark.time_limit(1800)  # compiles the extension from nothing
def test_wheel_holds_the_extension_its_stub_and_the_typing_marker(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert [name for name in names if re.fullmatch(r"rrfp/_C\.[^/]*\.so", name)], names
    for name in ("rrfp/__init__.py", "rrfp/_C.pyi", "rrfp/py.typed"):
        assert name in names
    strangers = [name for name in names if not name.startswith(("rrfp/", "rrfp-"))]
    assert not strangers, "the wheel installs what is not rrfp's"


@pytest.mark.time_limit(1800)
def test_installed_wheel_imports_and_says_what_it_is(wheel, tmp_path):
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index",
                    "--target", str(tmp_path), str(wheel)], check=True)
    code = "import rrfp; print(rrfp.__file__); print(dict(rrfp.build_info())['version'])"
    done = subprocess.run([sys.executable, "-c", code], cwd="/", capture_output=True, text=True,
                          env={**os.environ, "PYTHONPATH": str(tmp_path)})
    assert done.returncode == 0, done.stderr
    where, version = done.stdout.split()
    assert Path(where).is_relative_to(tmp_path)
    assert version == declared_version()


def test_version_is_that_of_pyproject():
    assert rrfp.__version__ == declared_version()


def test_build_requires_no_torch():
    """An isolated build would fetch gigabytes, and tie the wheel to one torch release."""
    text = (ROOT / "pyproject.toml").read_text()
    requires = re.search(r"^requires = \[(.*)\]$", text, re.MULTILINE).group(1)
    assert "pybind11" in requires and "torch" not in requires


@pytest.mark.parametrize("is_built", [
    False, pytest.param(True, marks=[pytest.mark.slow, pytest.mark.time_limit(1800)]),
])
def test_without_its_package_pybind11_is_torchs(is_built, tmp_path):
    """`pip install --no-build-isolation` on a machine that has torch and reaches no index."""
    done = configure(
        tmp_path, "-DCMAKE_DISABLE_FIND_PACKAGE_pybind11=ON", "-DRRFP_BUILD_PYTHON=ON",
        "-DRRFP_CUDA=off", "-DCMAKE_EXPORT_COMPILE_COMMANDS=ON", "-DCMAKE_CXX_FLAGS=-O0")
    assert done.returncode == 0, done.stdout + done.stderr
    headers = Path(torch.__file__).parent / "include"
    assert f"pybind11: not installed, taken from {headers}" in done.stdout
    assert f"-isystem {headers}" in (tmp_path / "compile_commands.json").read_text()
    if is_built:
        subprocess.run([cmake(), "--build", str(tmp_path), "--target", "_C", "-j2"], check=True)
        code = "import _C; print(_C.build_info()['pybind11'])"
        done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True,
                              capture_output=True, text=True)
        assert re.fullmatch(r"3\.\d+\.\d+ of torch\n", done.stdout), done.stdout


def test_extension_needs_neither_torch_nor_libpython():
    (extension,) = (ROOT / "rrfp").glob("_C*.so")
    done = subprocess.run(["ldd", str(extension)], capture_output=True, text=True, check=True)
    libraries = [line.split()[0] for line in done.stdout.splitlines() if line.strip()]
    assert any("libstdc++" in name for name in libraries)
    bad = [name for name in libraries if re.search(r"torch|c10|libpython", name)]
    assert not bad


@pytest.mark.time_limit(1800)
def test_second_build_compiles_nothing():
    """The build folder is kept: an editable install is cheap enough to repeat all day."""
    command = [sys.executable, "setup.py", "build_ext", "--inplace"]
    environment = {**os.environ, "PYTHONWARNINGS": "ignore"}
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, env=environment)
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True,
                          env=environment)
    assert "no work to do" in done.stdout, done.stdout[-3000:]
