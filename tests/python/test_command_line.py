"""``python -m rrfp``: what it prints. Would catch: a command that does not start any more."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import rrfp
from rrfp.__main__ import main


def test_info(capsys):
    main(["info"])
    text = capsys.readouterr().out
    assert f"version: {rrfp.__version__}" in text
    names = [line.partition(":")[0] for line in text.splitlines()]
    assert len(set(names)) == len(names), "a row twice"
    assert "setting heartbeat_ms: " in text and "address for other hosts: " in text
    assert not re.search(r": *$|: (None|True|False)$", text, re.MULTILINE), "a value without a word"


@pytest.mark.parametrize(("has_cuda", "torch_cuda", "expected"), [
    (False, None, "none; rrfp and this torch are both for CPUs"),
    (False, "13.0", "none: when rrfp was built, no header lies there"),
    (True, None, "13.1, which this torch lacks"),
    (True, "13.0", "13.1"),
])
def test_info_says_whether_cuda_is_in(has_cuda, torch_cuda, expected, capsys, monkeypatch):
    """Would catch: who has a torch for CPUs is sent to install headers for GPUs."""
    built = {**rrfp.build_info(), "cuda": has_cuda, "cuda_version": 13010 * has_cuda,
             "cuda_refusal": "" if has_cuda else "no header lies there"}
    monkeypatch.setattr(rrfp, "build_info", lambda: built)
    monkeypatch.setattr(torch.version, "cuda", torch_cuda)
    main(["info"])
    assert f"\ncuda: {expected}\n" in capsys.readouterr().out


def test_demo(capsys):
    main(["demo"])
    about, *runs, summary = capsys.readouterr().out.strip().split("\n\n")
    assert "sleep" in about
    heads = [run.split("\n")[0] for run in runs]
    titles = [head.rpartition(": loss ")[0] for head in heads]
    assert titles == [
        "fixed 1F1B order, which has 4, 3, 2 and 1 in flight", "by readiness, the same limits",
        "by readiness, limit 8 on each rank"]
    assert len({head.split()[-1] for head in heads}) == 1, "losses differ"
    limits = [re.findall(r"of (\d)$", run, re.MULTILINE) for run in runs]
    assert limits == [list("4321"), list("4321"), list("8888")]
    rows = re.findall(r"^ *(\S+) ms +(\S+)  (.*)$", summary, re.MULTILINE)
    *rows, (bound, _, about_bound) = rows
    assert [title for _, _, title in rows] == titles
    assert "no order takes less" in about_bound and float(bound) > 12 * 4  # sleeps of one stage
    walls = [max(map(float, re.findall(r"^ +\d +(\S+) ", run, re.MULTILINE))) for run in runs]
    assert float(bound) < min(walls)
    for (wall, ratio, _), of_table in zip(rows, walls, strict=True):
        assert float(wall) == pytest.approx(of_table, abs=0.06)  # rounded
        assert float(ratio) == pytest.approx(walls[0] / of_table, abs=0.006)
    assert summary.splitlines()[-1].startswith("Below 1 is slower: ")


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


def test_sources_that_are_not_built_say_so(tmp_path):
    """A clone beside an installed rrfp: Python finds the sources first. Without the site's
    packages, so that nothing but these sources can be found."""
    shutil.copytree(Path(rrfp.__file__).parent, tmp_path / "rrfp",
                    ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    run = subprocess.run([sys.executable, "-S", "-m", "rrfp", "info"], capture_output=True,
                         text=True, timeout=60, cwd=tmp_path)
    assert run.returncode != 0
    message = run.stderr.strip().split("\n")[-1]
    assert str(tmp_path / "rrfp") in message and "another folder" in message, run.stderr
    assert "make build" in message and "circular" not in run.stderr
