"""Folds of the rows: which rows a dictionary learns from, and which it is judged by.

A *holdout* is the set of folds that a dictionary does not see: none, one, or two.
"""

from typing import TypeAlias

import numpy as np

Holdout: TypeAlias = tuple[int, ...]


def assign_folds(num_rows: int, num_folds: int, rng: np.random.Generator) -> np.ndarray:
    """One balanced fold per row, (n,)."""
    return rng.permutation(np.arange(num_rows) % min(num_folds, num_rows))


def judging_folds(folds: np.ndarray, enough: int) -> np.ndarray:
    """As many of the folds as have `enough` rows, (n,); rows of the others are in none, -1.

    For choices, which need not be judged by all rows: no dictionary has to leave the others out.
    """
    sizes = np.cumsum(np.bincount(folds))
    num_used = 1 + int(np.searchsorted(sizes, min(enough, sizes[-1])))
    return folds if num_used == sizes.size else np.where(folds < num_used, folds, -1)


def each_fold(folds: np.ndarray | None) -> list[Holdout]:
    """Nothing held out, and each fold alone."""
    return [()] if folds is None else [(), *((fold,) for fold in range(int(folds.max()) + 1))]


def kept_rows(rows: np.ndarray, folds: np.ndarray | None, holdouts: list[Holdout]) -> list[np.ndarray]:
    """Mask of the `rows` that stay under each holdout, (rows.size,)."""
    return [np.ones(rows.size, dtype=bool) if folds is None else ~np.isin(folds[rows], out) for out in holdouts]
