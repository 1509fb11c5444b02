"""The main job, small: the script that `make train` runs, in one process and in four.

The script itself compares losses and gradients with a plain loop and exits with 1 when they
differ; here it must also have said so, learned something, and counted its tokens.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SMALL = ["--steps", "8", "--microbatches", "6", "--max-length", "96", "--width", "32",
         "--blocks", "4"]


def run(command, **environment):
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, cwd=ROOT,
                          timeout=240, env={**os.environ, **environment})
    assert done.returncode == 0, f"exit status {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def check(output):
    first, last = map(float, re.search(r"loss (\S+) at the first step, (\S+) at the last",
                                       output).groups())
    assert last < first - 0.2
    loss, grad = map(float, re.search(r"difference in loss (\S+), in gradient (\S+)",
                                      output).groups())
    assert loss <= 1e-4 and 0 < grad <= 1e-4
    assert re.search(r"\d+ tokens/s", output)
    lengths = re.search(r"lengths (\d+) to (\d+) bytes", output)
    assert int(lengths.group(1)) < int(lengths.group(2))
    report = output.partition("the last step, rank by rank:")[2]
    for rank in range(4):
        assert re.search(rf"^\s*(?:rank )?{rank}\b", report, re.MULTILINE), report


def limits(output):
    """Of the report's rows: how many microbatches could be in flight."""
    return re.findall(r"^ *\d .* \d+ of (\d+)$", output, re.MULTILINE)


def test_one_process():
    output = run(["examples/train_gpt.py", "--ranks", "4", "--max-in-flight", "6", *SMALL])
    check(output)
    assert limits(output) == ["6"] * 4


def test_four_processes():
    output = run(["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4",
                  "examples/train_gpt.py", *SMALL])
    check(output)
    assert limits(output) == ["4"] * 4


def test_a_limit_in_bytes():
    output = run(["examples/train_gpt.py", "--ranks", "2", "--max-in-flight", "1GiB", *SMALL])
    assert output.count("its limit is 1.00 GiB") == 2, output


def test_wrong_gradients_would_be_noticed(tmp_path):
    """The comparison at the end must be able to fail: here the pipeline's loss is scaled."""
    spoiled = tmp_path / "spoiled.py"
    spoiled.write_text(
        "import runpy, sys\n"
        "import rrfp\n"
        "original = rrfp.run_pipeline\n"
        "rrfp.run_pipeline = lambda *a, **k: original(*a, grad_scale=1.001, **k)\n"
        f"sys.path.insert(0, {str(ROOT / 'examples')!r})\n"
        f"runpy.run_path({str(ROOT / 'examples/train_gpt.py')!r}, run_name='__main__')\n")
    done = subprocess.run([sys.executable, str(spoiled), "--ranks", "2", *SMALL],
                          capture_output=True, text=True, timeout=240)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "computed something else" in done.stdout
