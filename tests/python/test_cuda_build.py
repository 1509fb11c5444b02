"""The CUDA build: what is missing is named, and what is built imports and answers without a GPU.

The headers are looked for where the build looks; `make test` installs them before it builds the
extension.
"""

import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest
from configured import configure

import rrfp

ROOT = Path(__file__).resolve().parents[2]
CODE = """
from rrfp import _C
info, support = _C.build_info(), _C.cuda_support()
assert info["cuda"] and info["cuda_version"] >= 12050 and not info["cuda_refusal"], info
assert support["is_built"], support
entries = {
    "ipc_link": lambda: _C.ipc_link(0, 2, 0, True),
    "nccl_link": lambda: _C.nccl_link(0, [(0, 1)], 0),
    "make_device_runtimes": lambda: _C.make_device_runtimes([0, 1], 1, 1000, 1000),
}
for name, entry in entries.items() if support["num_devices"] == 0 else ():
    assert support["refusal"], support
    try:
        entry()
    except _C.StatusError as error:
        assert error.code == _C.StatusCode.DEVICE_FAILED, (name, error)
        assert support["refusal"] in error.message, (name, error)
    else:
        raise AssertionError(f"{name} without a device")
print("fine")
"""


def test_an_unknown_choice_is_refused(tmp_path):
    done = configure(tmp_path, "-DRRFP_CUDA=perhaps")
    assert done.returncode != 0
    assert "RRFP_CUDA is perhaps; use off, on or auto" in " ".join(done.stderr.split())


@pytest.mark.parametrize(
    ("missing", "package"),
    [
        ("RRFP_CUDA_INCLUDE", "nvidia-cuda-runtime"),
        ("RRFP_CUDA_LIBRARY", "nvidia-cuda-runtime"),
        ("RRFP_CUDA_CRT_INCLUDE", "nvidia-cuda-crt"),
        ("RRFP_CUDA_CCCL_INCLUDE", "nvidia-cuda-cccl"),
        ("RRFP_NCCL_INCLUDE", "nvidia-nccl-cu13"),
    ],
)
def test_on_without_a_header_names_the_package(missing, package, tmp_path):
    headers = tmp_path / "headers"
    headers.mkdir()
    (headers / "cudaTypedefs.h").touch()
    (headers / "cuda_runtime_api.h").write_text("#define CUDART_VERSION 13000\n")
    names = ("CUDA_INCLUDE", "CUDA_LIBRARY", "CUDA_CRT_INCLUDE", "CUDA_CCCL_INCLUDE",
             "NCCL_INCLUDE")
    found = {f"RRFP_{name}": headers for name in names} | {missing: "OFF"}
    done = configure(tmp_path / "build", "-DRRFP_CUDA=on",
                     *(f"-D{name}={value}" for name, value in found.items()))
    assert done.returncode != 0
    words = " ".join(done.stderr.split())
    assert "RRFP_CUDA is on, but" in words and f"pip install {package}" in words, words
    assert words.count("pip install") == 1, words


def test_auto_says_what_it_did(tmp_path):
    done = configure(tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert ("rrfp: CPU-only, because " in done.stdout) != ("rrfp: with CUDA " in done.stdout)


def test_an_isolated_build_finds_the_headers_of_its_environment(tmp_path):
    """pip takes the environment's packages off sys.path while it builds."""
    environment, isolation = tmp_path / "environment", tmp_path / "isolation"
    venv.create(environment, with_pip=False)
    (site,) = environment.glob("lib/python*/site-packages")
    include = site / "nvidia" / "nccl" / "include"
    include.mkdir(parents=True)
    (include / "nccl.h").touch()
    isolation.mkdir()
    (isolation / "sitecustomize.py").write_text(
        f"import sys\nsys.path[:] = [p for p in sys.path if p != {str(site)!r}]\n")
    env = {k: v for k, v in os.environ.items() if k != "NCCL_HOME"}
    done = configure(
        tmp_path / "build", f"-DPython_EXECUTABLE={environment / 'bin' / 'python'}",
        "-DRRFP_BUILD_PYTHON=OFF", env=env | {"PYTHONPATH": str(isolation)})
    assert done.returncode == 0, done.stderr
    cache = (tmp_path / "build" / "CMakeCache.txt").read_text()
    assert f"RRFP_NCCL_INCLUDE:PATH={include}" in cache, done.stdout


def test_what_is_built_imports_and_answers_without_a_gpu(tmp_path):
    """Compiled and linked with all that the headers allow; nothing falls back silently."""
    done = configure(tmp_path, "-DRRFP_CUDA=on")
    if done.returncode != 0:
        pytest.skip("runs with the headers of CUDA and NCCL, which make test installs")
    assert rrfp.build_info()["cuda"], "the headers are here, but rrfp was built before; make build"
    ran = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, cwd=ROOT)
    assert ran.stdout == "fine\n", ran.stderr
