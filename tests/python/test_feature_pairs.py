"""Every pair of features has a float64 parity seed, in one process and in several; the matrix in
docs/features.md says so, and what is refused or not tested."""

import itertools
import os
import runpy
from pathlib import Path

import feature_pairs
import parity_model as model
import pytest
import torch
from parity_group import worker_group

ROOT = Path(__file__).resolve().parents[2]
SEED = int(os.environ.get("RRFP_SEED", "20260518"))
CASES = feature_pairs.cover(SEED)


def check(case, answers):
    _, on = case
    losses, outputs, gradients = feature_pairs.reference(case)
    merged = {}
    for index, (found, got_outputs, metrics, of_rank) in enumerate(answers):
        merged.update(of_rank)
        is_last = index == len(answers) - 1
        if is_last or "broadcast" in on:
            for got, want in zip(found, losses, strict=True):
                torch.testing.assert_close(torch.tensor(got), torch.tensor(want), rtol=1e-10,
                                           atol=1e-12)
        else:
            assert found == [None] * len(losses)
        if is_last and "outputs" in on:
            for got, want in zip(got_outputs, outputs, strict=True):
                assert model.gradient_error(got, want) <= 1e-10
        else:
            assert got_outputs is None
        for got, rows in metrics:
            want = [{"rows": count} for count in rows]
            assert got == (want if is_last and "metrics" in on else None)
    assert merged.keys() == gradients.keys()
    for name, want in gradients.items():
        error = model.gradient_error(merged[name], want)
        assert error <= 1e-10, f"gradient of {name} is off by {error:.3g}"


@pytest.mark.parametrize("mode", ["threads", "processes"])
@pytest.mark.parametrize("index", range(len(CASES)))
def test_pairs_match_the_plain_loop(mode, index):
    case = CASES[index]
    num_ranks = feature_pairs.pipeline_options(case[1])[1]
    group = worker_group(1, False) if mode == "threads" else worker_group(num_ranks)
    try:
        check(case, group.values(feature_pairs.run, case))
    except AssertionError as error:
        raise AssertionError(f"seed {SEED}, {case[0]} with {sorted(case[1])}: {error}") from error


def test_cover_is_pairwise():
    for a, b in itertools.combinations(feature_pairs.FEATURES, 2):
        together = any({a, b} <= on for _, on in CASES)
        is_refused = (a, b) in feature_pairs.REFUSED or (b, a) in feature_pairs.REFUSED
        assert together != is_refused, (a, b)
    for name in feature_pairs.FEATURES:
        assert any(name not in on for _, on in CASES), name


@pytest.mark.parametrize("pair", feature_pairs.REFUSED)
def test_refused_pairs_say_why(pair):
    with pytest.raises(ValueError, match=feature_pairs.REFUSED[pair]):
        feature_pairs.run(0, 1, (1, frozenset(pair)))


def test_the_page_is_what_the_tables_say():
    script = runpy.run_path(str(ROOT / "docs/features.py"))
    path = ROOT / "docs/features.md"
    assert script["page"]() == path.read_text(), "run: python docs/features.py"


def test_evidence_of_the_page_exists():
    script = runpy.run_path(str(ROOT / "docs/features.py"))
    for _, where, _ in script["OTHERS"].values():
        file, _, function = where.partition("::")
        assert f"def {function}(" in (ROOT / file).read_text(), where
