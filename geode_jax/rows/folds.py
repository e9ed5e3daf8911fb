"""Folds of the rows: which rows a dictionary is learned from, and on which it is judged.

A *holdout* is the set of folds that a dictionary is not learned from: none, one, or two.
"""

from typing import TypeAlias

import numpy as np

Holdout: TypeAlias = tuple[int, ...]


def assign_folds(num_rows: int, num_folds: int, rng: np.random.Generator) -> np.ndarray:
    """The fold of every row, (n,); folds have equal sizes up to one row."""
    return rng.permutation(np.arange(num_rows) % min(num_folds, num_rows))


def judging_folds(folds: np.ndarray, enough: int) -> np.ndarray:
    """The first folds that together have `enough` rows, (n,); rows of the other folds get -1.

    For choices, which need not be judged on all rows: no dictionary then has to be learned without the other folds.
    """
    sizes = np.cumsum(np.bincount(folds))
    num_used = 1 + int(np.searchsorted(sizes, min(enough, sizes[-1])))
    return folds if num_used == sizes.size else np.where(folds < num_used, folds, -1)


def each_fold(folds: np.ndarray | None) -> list[Holdout]:
    """The holdouts of a fit: no fold, and each fold alone."""
    return [()] if folds is None else [(), *((fold,) for fold in range(int(folds.max()) + 1))]


def kept_rows(rows: np.ndarray, folds: np.ndarray | None, holdouts: list[Holdout]) -> list[np.ndarray]:
    """For each holdout, the mask of the `rows` that are not held out, (rows.size,)."""
    return [np.ones(rows.size, dtype=bool) if folds is None else ~np.isin(folds[rows], out) for out in holdouts]
