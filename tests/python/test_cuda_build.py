"""The CUDA build: what is missing is named, and it compiles, links and imports without a GPU.

The headers are looked for where the build looks; `pip install nvidia-cuda-runtime
nvidia-nccl-cu13` brings them, or NCCL_HOME names a folder with include/nccl.h.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CODE = """
import sys
sys.path.insert(0, sys.argv[1])
import _C
info, support = _C.build_info(), _C.cuda_support()
assert info["cuda"] and info["cuda_version"] >= 12050 and not info["cuda_refusal"], info
assert support["is_built"], support
if support["num_devices"] == 0:
    assert support["refusal"], support
    try:
        _C.ipc_link(0, 1, 0, True)
    except _C.StatusError as error:
        assert error.code == _C.StatusCode.DEVICE_FAILED, error
        assert support["refusal"] in error.message, error
    else:
        raise AssertionError("a link without a device")
print("fine")
"""


def configure(folder, *options, **environment):
    cmake = Path(sys.executable).parent / "cmake"
    cmake = str(cmake) if cmake.exists() else shutil.which("cmake")
    assert cmake, f"cmake was not found; run {sys.executable} -m pip install cmake"
    import pybind11

    done = subprocess.run(
        [cmake, "-S", str(ROOT), "-B", str(folder), f"-DPython_EXECUTABLE={sys.executable}",
         f"-Dpybind11_DIR={pybind11.get_cmake_dir()}", *options],
        capture_output=True, text=True, env={**os.environ, **environment},
    )
    return cmake, done


def test_an_unknown_choice_is_refused(tmp_path):
    _, done = configure(tmp_path, "-DRRFP_CUDA=perhaps")
    assert done.returncode != 0
    assert "RRFP_CUDA is perhaps; use off, on or auto" in " ".join(done.stderr.split())


def test_on_without_headers_names_the_package(tmp_path):
    _, done = configure(tmp_path, "-DRRFP_CUDA=on")
    if done.returncode == 0:
        pytest.skip("runs where the CUDA and NCCL headers are not installed")
    words = " ".join(done.stderr.split())
    assert "RRFP_CUDA is on, but" in words and "pip install nvidia-" in words, words


def test_auto_says_what_it_did(tmp_path):
    _, done = configure(tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert ("rrfp: CPU-only, because " in done.stdout) != ("rrfp: with CUDA " in done.stdout)


@pytest.mark.slow
def test_builds_and_imports(tmp_path):
    cmake, done = configure(tmp_path, "-DRRFP_CUDA=on", "-DRRFP_WERROR=ON")
    if done.returncode != 0:
        pytest.skip("runs where nvidia-cuda-runtime and nvidia-nccl-cu13 are installed")
    built = subprocess.run([cmake, "--build", str(tmp_path), "--target", "_C", "--parallel", "2"],
                           capture_output=True, text=True)
    assert built.returncode == 0, built.stdout[-6000:]
    ran = subprocess.run([sys.executable, "-c", CODE, str(tmp_path)], capture_output=True,
                         text=True)
    assert ran.stdout == "fine\n", ran.stderr
