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
from feature_stages import loss_stages_of, reference
from parity_group import worker_group

ROOT = Path(__file__).resolve().parents[2]
SEED = int(os.environ.get("RRFP_SEED", "20260518"))
CASES = feature_pairs.cover(SEED)
TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])


def check_answer(on, answer, losses, outputs):
    """Losses, outputs and metrics of one process, which has those of its loss stages."""
    owned, found, got_outputs, metrics, _ = answer
    own = [s for s in loss_stages_of(on) if s in owned]
    for got, want in zip(found, losses, strict=True):
        assert sorted(got) == (loss_stages_of(on) if "broadcast" in on else own)
        for stage, of_stage in got.items():
            torch.testing.assert_close(torch.tensor(of_stage), torch.tensor(want[stage]),
                                       rtol=1e-10, atol=1e-12)
    assert sorted(got_outputs) == (own if "outputs" in on else [])
    for stage, of_stage in got_outputs.items():
        for got, want in zip(of_stage, outputs[stage], strict=True):
            assert model.gradient_error(got, want) <= 1e-10
    for got, rows in metrics:
        want = [{"rows": count} for count in rows]
        assert got == {stage: want for stage in own if "metrics" in on}


def check(case, answers):
    _, on = case
    losses, outputs, gradients = reference(case)
    merged = {}
    for answer in answers:
        check_answer(on, answer, losses, outputs)
        for name, gradient in answer[-1].items():
            if name in merged:  # of another member of the agreement group
                assert (gradient is None) == (merged[name] is None), name
            error = model.gradient_error(gradient, gradients[name])
            assert error <= 1e-10, f"gradient of {name} is off by {error:.3g}"
            merged[name] = gradient
    assert merged.keys() == gradients.keys()


@pytest.mark.parametrize("mode", ["threads", "processes"])
@pytest.mark.parametrize("index", range(len(CASES)))
def test_pairs_match_the_plain_loop(mode, index):
    case = CASES[index]
    if mode == "threads" and "compile" in case[1] and TORCH < (2, 12):
        pytest.skip("its tracer crashes beside other threads (docs/pitfalls.md): needs torch 2.12")
    group = worker_group(1, False) if mode == "threads" else worker_group(4)
    try:
        check(case, [a for a in group.values(feature_pairs.run, case) if a is not None])
    except AssertionError as error:
        raise AssertionError(f"seed {SEED}, {case[0]} with {sorted(case[1])}: {error}") from error


def test_cover_is_pairwise():
    for a, b in itertools.combinations(feature_pairs.FEATURES, 2):
        together = any({a, b} <= on for _, on in CASES)
        assert together != feature_pairs.are_apart(a, b), (a, b)
    for name in feature_pairs.FEATURES:
        assert any(name not in on for _, on in CASES), name


@pytest.mark.parametrize("pair", feature_pairs.REFUSED)
def test_refused_pairs_say_why(pair):
    group = worker_group(4) if "group" in pair else worker_group(1, False)
    for answer in group.run(feature_pairs.run, (1, frozenset(pair))):
        assert answer.error_type == "ValueError", answer
        assert feature_pairs.REFUSED[pair] in answer.error_text


def test_the_page_is_what_the_tables_say():
    script = runpy.run_path(str(ROOT / "docs/features.py"))
    path = ROOT / "docs/features.md"
    assert script["page"]() == path.read_text(), "run: python docs/features.py"


def test_evidence_of_the_page_exists():
    script = runpy.run_path(str(ROOT / "docs/features.py"))
    for _, where, _ in script["OTHERS"].values():
        file, _, function = where.partition("::")
        assert f"def {function}(" in (ROOT / file).read_text(), where
