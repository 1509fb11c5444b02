"""``python -m rrfp``: what it prints. Would catch: a command that does not start any more."""

import subprocess
import sys

import pytest

import rrfp
from rrfp.__main__ import main


def test_info(capsys):
    main(["info"])
    text = capsys.readouterr().out
    assert f"version: {rrfp.__version__}" in text
    assert "setting heartbeat_ms: " in text and "address for other hosts: " in text


def test_demo(capsys):
    main(["demo"])
    fixed, ready = capsys.readouterr().out.strip().split("\n\n")
    assert fixed.startswith("fixed 1F1B order: loss ") and ready.startswith("by readiness: loss ")
    assert fixed.split("\n")[0].split()[-1] == ready.split("\n")[0].split()[-1], "losses differ"


def test_unknown_command(capsys):
    with pytest.raises(SystemExit):
        main(["fly"])
    assert "info" in capsys.readouterr().err


def test_as_a_module():
    run = subprocess.run([sys.executable, "-m", "rrfp", "info"], capture_output=True, text=True,
                         timeout=300)
    assert run.returncode == 0 and "torch: " in run.stdout, run.stderr
