"""Every C++ test program, built by one CMake run, run on all cores and judged as one test each.

They are built in the folder of the extension, whose layers they link. With the headers of CUDA and
NCCL that includes those of the device channels, on a CUDA runtime made of threads.
The stress and transport programs run a second time under ThreadSanitizer: an ordering bug that
the plain build hides by luck is what it finds.
"""

import fcntl
import os
import platform
import shlex
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pybind11
import pytest

ROOT = Path(__file__).resolve().parents[2]
PLAIN_BUILD = ROOT / "build" / sys.implementation.cache_tag
NETS = ("unit", "stress", "model", "transport", "sim")
SANITIZED_NETS = ("stress", "transport")
RUN_LIMIT_S = 800  # agreement_model takes 25 s alone; far more beside other work


def programs(nets):
    return sorted(path.stem for net in nets for path in (ROOT / "tests/cpp" / net).glob("*.cc"))


def device_programs():
    return sorted(f"{path.stem}_fake" for path in (ROOT / "tests/cpp/gpu").glob("*_test.cc"))


def tool(name):
    """CMake and Ninja as the build itself takes them: of this interpreter, else from PATH."""
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    assert found, f"{name} was not found; run {sys.executable} -m pip install {name}"
    return found


def call(*command):
    """What the command printed; fails with the compiler's words."""
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, (
        f"{shlex.join(command)} ended with {done.returncode}:\n"
        f"{done.stdout[-6000:]}{done.stderr[-3000:]}")
    return done.stdout


def build(folder, names, *options, device_names=()):
    """Configure, and build the programs of these names; of ``device_names`` too if CUDA is in.
    Returns whether it is."""
    folder.mkdir(parents=True, exist_ok=True)
    extra = shlex.split(os.environ.get("RRFP_CMAKE_ARGS", ""))
    with open(folder / "in-use", "w") as lock:  # setup.py builds here as well
        fcntl.flock(lock, fcntl.LOCK_EX)
        has_cuda = "rrfp: with CUDA " in call(
            tool("cmake"), "-S", str(ROOT), "-B", str(folder), "-G", "Ninja",
            f"-DCMAKE_MAKE_PROGRAM={tool('ninja')}", "-DRRFP_BUILD_TESTS=ON", *extra, *options)
        call(tool("cmake"), "--build", str(folder), "--target", *names,
             *(device_names if has_cuda else ()))
    return has_cuda


def build_plain(names, **more):
    return build(PLAIN_BUILD, names, "-DRRFP_BUILD_PYTHON=ON",
                 f"-DPython_EXECUTABLE={sys.executable}",
                 f"-Dpybind11_DIR={pybind11.get_cmake_dir()}", **more)


@pytest.fixture(scope="session")
def plain_build():
    """Whether it has CUDA."""
    return build_plain(programs(NETS), device_names=device_programs())


@pytest.fixture(scope="session")
def thread_sanitizer_build():
    folder = ROOT / "build/cpp-tests-thread"
    build(folder, programs(SANITIZED_NETS), "-DRRFP_BUILD_PYTHON=OFF", "-DRRFP_CUDA=off",
          "-DRRFP_SANITIZE=thread", "-DCMAKE_CXX_FLAGS_RELEASE=-O1 -DNDEBUG")
    return folder


@pytest.fixture(scope="session")
def plain_runs(plain_build, request):
    yield from run_all(request, test_program, lambda name: run([str(PLAIN_BUILD / name)]))


@pytest.fixture(scope="session")
def device_runs(plain_build, request):
    if not plain_build:
        pytest.skip("runs with the headers of CUDA and NCCL, which make test installs")
    yield from run_all(request, test_device_program,
                       lambda name: run([str(PLAIN_BUILD / "tests/cpp/gpu" / name)]))


@pytest.fixture(scope="session")
def thread_sanitizer_runs(thread_sanitizer_build, request):
    yield from run_all(request, test_program_under_thread_sanitizer,
                       lambda name: run_sanitized([str(thread_sanitizer_build / name)]))


def run_all(request, test, run_one):
    """{program: Future} of the programs that `test` is to judge, run on all cores."""
    names = [item.callspec.params["name"] for item in request.session.items
             if getattr(item, "function", None) is test]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        yield {name: pool.submit(run_one, name) for name in names}
        pool.shutdown(cancel_futures=True)


def run(program, **environment):
    return subprocess.run(program, capture_output=True, text=True, timeout=RUN_LIMIT_S,
                          env={**os.environ, **environment})


def run_sanitized(program):
    options = {"TSAN_OPTIONS": "halt_on_error=1 exitcode=66"}
    done = run(program, **options)
    if "unexpected memory mapping" in done.stderr:
        # Kernels with more address randomisation than this compiler's runtime expects.
        done = run(["setarch", platform.machine(), "-R", *program], **options)
    return done


def report(done):
    return f"exit status {done.returncode}\n{done.stdout[-6000:]}\n{done.stderr[-6000:]}"


@pytest.mark.time_limit(1800)  # the first one also builds them all
@pytest.mark.parametrize("name", programs(NETS))
def test_program(plain_runs, name):
    done = plain_runs[name].result()
    assert done.returncode == 0, report(done)


@pytest.mark.time_limit(1800)
@pytest.mark.parametrize("name", device_programs())
def test_device_program(device_runs, name):
    done = device_runs[name].result()
    assert done.returncode == 0, report(done)


@pytest.mark.slow
def test_each_source_includes_what_it_uses(tmp_path):
    """The usual build compiles several sources at once, where one can live on another's headers."""
    build(tmp_path, programs(("sim",)), "-DRRFP_BUILD_PYTHON=OFF", "-DCMAKE_UNITY_BUILD=OFF",
          "-DCMAKE_DISABLE_PRECOMPILE_HEADERS=ON", "-DCMAKE_BUILD_TYPE=Debug")


@pytest.mark.slow
@pytest.mark.time_limit(3600)
@pytest.mark.parametrize("name", ["pipeline_sim", "runtime_sim"])
def test_a_million_seeds(name):
    """One share of the seeds per core; prints the time. Builds this program alone."""
    build_plain([name])
    num_shares = os.cpu_count() or 1
    num_seeds = -(-1_000_000 // num_shares)
    start = time.monotonic()
    shares = [
        subprocess.Popen([str(PLAIN_BUILD / name), str(num_seeds)], text=True,
                         stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                         env={**os.environ, "RRFP_SEED": str(10**9 + share * num_seeds)})
        for share in range(num_shares)]
    try:
        outputs = [share.communicate(timeout=3500)[0] for share in shares]
    finally:
        for share in shares:
            share.kill()
    print(f"{name}: {num_shares} x {num_seeds} seeds in {time.monotonic() - start:.0f} s")
    for share, output in zip(shares, outputs, strict=True):
        print(output)
        assert share.returncode == 0, f"exit status {share.returncode}\n{output[-6000:]}"


@pytest.mark.time_limit(1800)
@pytest.mark.parametrize("name", programs(SANITIZED_NETS))
def test_program_under_thread_sanitizer(thread_sanitizer_runs, name):
    done = thread_sanitizer_runs[name].result()
    assert done.returncode == 0, report(done)
    assert "ThreadSanitizer" not in done.stderr, report(done)


def test_thread_sanitizer_sees_a_planted_race(tmp_path):
    """A sanitizer that finds nothing in a racy program proves nothing about ours."""
    source = tmp_path / "race.cc"
    source.write_text("#include <thread>\nint shared;\nint main() {\n"
                      "  std::thread other([] { for (int i = 0; i < 100000; ++i) ++shared; });\n"
                      "  for (int i = 0; i < 100000; ++i) ++shared;\n  other.join();\n}\n")
    program = tmp_path / "race"
    subprocess.run([os.environ.get("CXX", "g++"), "-std=c++20", "-g", "-fsanitize=thread",
                    str(source), "-o", str(program), "-pthread"], check=True)
    done = run_sanitized([str(program)])
    assert "data race" in done.stderr, report(done)
