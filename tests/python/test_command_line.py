"""``python -m rrfp``: what it prints. Would catch: a command that does not start any more."""

import re
import subprocess
import sys

import pytest

import rrfp
from rrfp.__main__ import main


def test_info(capsys):
    main(["info"])
    text = capsys.readouterr().out
    assert f"version: {rrfp.__version__}" in text
    names = [line.partition(":")[0] for line in text.splitlines()]
    assert len(set(names)) == len(names), "a row twice"
    assert "setting heartbeat_ms: " in text and "address for other hosts: " in text


def test_demo(capsys):
    main(["demo"])
    runs = capsys.readouterr().out.strip().split("\n\n")
    heads = [run.split("\n")[0] for run in runs]
    assert [head.rpartition(": loss ")[0] for head in heads] == [
        "fixed 1F1B order, which has 4, 3, 2 and 1 in flight", "by readiness, the same limits",
        "by readiness, limit 8 on each rank"]
    assert len({head.split()[-1] for head in heads}) == 1, "losses differ"
    limits = [re.findall(r"of (\d)$", run, re.MULTILINE) for run in runs]
    assert limits == [list("4321"), list("4321"), list("8888")]


def test_the_package_shows_public_names_only():
    assert dir(rrfp) == sorted([*rrfp.__all__, "__version__"])
    assert all(hasattr(rrfp, name) for name in dir(rrfp))


def test_unknown_command(capsys):
    with pytest.raises(SystemExit):
        main(["fly"])
    assert "info" in capsys.readouterr().err


def test_as_a_module():
    run = subprocess.run([sys.executable, "-m", "rrfp", "info"], capture_output=True, text=True,
                         timeout=300)
    assert run.returncode == 0 and "torch: " in run.stdout, run.stderr
