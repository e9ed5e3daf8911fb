"""Folds of the rows: which rows a dictionary learns from, and which it is judged by."""

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np

LeftOut: TypeAlias = Sequence[tuple[int, ...]]  # for every group of dictionaries, the folds it does not see


def assign_folds(num_rows: int, num_folds: int, rng: np.random.Generator) -> np.ndarray:
    """One balanced fold per row, (n,)."""
    return rng.permutation(np.arange(num_rows) % min(num_folds, num_rows))


def judging_folds(folds: np.ndarray, enough: int) -> np.ndarray:
    """Folds that choices are judged by, (n,): so many that they have `enough` rows; rows of the others are in none, -1.

    No dictionary that is learned for a choice has to leave those out.
    """
    sizes = np.cumsum(np.bincount(folds))
    num_used = 1 + int(np.searchsorted(sizes, min(enough, sizes[-1])))
    return folds if num_used == sizes.size else np.where(folds < num_used, folds, -1)


def each_fold(folds: np.ndarray | None) -> LeftOut:
    """Nothing left out, and each fold alone."""
    return [()] if folds is None else [(), *((fold,) for fold in range(int(folds.max()) + 1))]


def kept_rows(rows: np.ndarray, folds: np.ndarray | None, left_out: LeftOut) -> list[np.ndarray]:
    """Mask of the `rows` that stay in each group, (rows.size,)."""
    return [np.ones(rows.size, dtype=bool) if folds is None else ~np.isin(folds[rows], group) for group in left_out]
