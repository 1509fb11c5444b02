"""Covers of settings: few rows in which every two values that may meet do meet."""

import itertools
import random


def all_pairs(factors, is_allowed):
    """Every allowed ((factor, value), (factor, value))."""
    return {
        ((name, value), (other, another))
        for (name, values), (other, others) in itertools.combinations(factors.items(), 2)
        for value, another in itertools.product(values, others)
        if is_allowed((name, value), (other, another))
    }


def pairs_of(row):
    return set(itertools.combinations(row.items(), 2))


def rows_of_cover(factors, is_allowed, seed, at_least=0, candidates=24):
    """Rows (dicts in the order of ``factors``), at least so many, that hold every allowed pair."""
    rng = random.Random(seed)
    uncovered = all_pairs(factors, is_allowed)
    rows = []
    while uncovered or len(rows) < at_least:
        best, best_pairs = None, set()
        for _ in range(candidates):
            row = {name: rng.choice(values) for name, values in factors.items()}
            if uncovered and rng.random() < 0.7:
                row.update(rng.choice(sorted(uncovered, key=repr)) if len(uncovered) < 60 else ())
            if not all(is_allowed(a, b) for a, b in itertools.combinations(row.items(), 2)):
                continue
            pairs = pairs_of(row) & uncovered
            if best is None or len(pairs) > len(best_pairs):
                best, best_pairs = row, pairs
            if not uncovered:
                break
        if best is not None:
            uncovered -= best_pairs
            rows.append((rng.randrange(10**6), best))
    return rows
