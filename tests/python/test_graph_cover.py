"""Every two features of a step meet in some case: gradients, losses, and how often each piece of
work was done are a plain loop's.

Would catch: a feature that breaks another, a checkpointed part recomputed twice or not at all, a
custom function that computes a gradient twice, once for I and once for W.
"""

import os

import graph_cover
import graph_cover_cases
import graph_parity
import pytest
from pairwise import all_pairs, pairs_of, rows_of_cover

SEED = int(os.environ.get("RRFP_SEED", "20261131"))


def cases(seed, at_least=0):
    rows = rows_of_cover(graph_cover_cases.FACTORS, graph_cover_cases.is_allowed, seed, at_least)
    return [graph_cover_cases.Case(seed=row_seed, **row) for row_seed, row in rows]


CASES = cases(SEED)


def run(case):
    graph_parity.run_case(graph_cover, case, in_process=case.mode == "threads")


@pytest.mark.parametrize("case", CASES, ids=str)
def test_matches_plain_loop(case):
    run(case)


@pytest.mark.slow
@pytest.mark.parametrize("chunk", range(20))
def test_thousands(chunk):
    for case in cases(SEED + 1 + chunk, at_least=150):
        run(case)


def test_every_pair_is_covered(capsys):
    wanted = all_pairs(graph_cover_cases.FACTORS, graph_cover_cases.is_allowed)
    covered = set().union(*(pairs_of({name: vars(case)[name] for name in graph_cover_cases.FACTORS})
                            for case in CASES))
    with capsys.disabled():
        print(f"\ncover: seed {SEED}, {len(CASES)} cases, {len(covered & wanted)} of "
              f"{len(wanted)} pairs of settings")
    assert wanted <= covered
