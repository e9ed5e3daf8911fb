"""Folds of the rows: which rows a dictionary is learned from, and on which it is judged.

A *holdout* is the set of folds that a dictionary is not learned from: none, one, or two.
"""

import heapq
from typing import NamedTuple, TypeAlias

import numpy as np

from geode_jax.rows.processes import ALONE, Processes

Holdout: TypeAlias = tuple[int, ...]


def assign_folds(
    num_rows: int, num_folds: int, rng: np.random.Generator, copies: np.ndarray | None = None
) -> np.ndarray:
    """The fold of every row, (n,). Folds have equal sizes up to one row, or as equal as the largest groups let them be.

    `copies`, (n,): groups of rows that are in one fold.
    """
    if copies is None:
        return rng.permutation(np.arange(num_rows) % min(num_folds, num_rows))
    sizes = np.bincount(copies)
    fold = np.zeros(sizes.size, dtype=int)
    order = np.lexsort((rng.random(sizes.size), -sizes))  # the largest first, in random order among equals
    num_several = int((sizes > 1).sum())
    filled = [(0, number) for number in range(min(num_folds, sizes.size))]
    for group in order[:num_several].tolist():  # each to the fold that has the fewest rows
        rows, fold[group] = filled[0]
        heapq.heapreplace(filled, (rows + int(sizes[group]), int(fold[group])))
    rows_of = np.array([rows for rows, _ in sorted(filled, key=lambda pair: pair[1])])
    fold[order[num_several:]] = _filling_up(rows_of, sizes.size - num_several)
    # in any order: choices may be judged on the first folds only
    return rng.permutation(rows_of.size)[fold][copies]


def _filling_up(rows_of: np.ndarray, number: int) -> np.ndarray:
    """Folds for so many more rows, (number,), which make folds that have `rows_of` rows as equal as can be."""
    folds = np.argsort(rows_of, kind="stable")
    rows = rows_of[folds]
    # the level to which the first 1, 2, ... folds could be filled; those that are lower get rows
    level = (np.cumsum(rows) + number) // np.arange(1, rows.size + 1)
    some = int((level >= rows).sum())
    more = level[some - 1] - rows[:some]
    more[: number - int(more.sum())] += 1
    return np.repeat(folds[:some], more)


def fold_sizes(folds: np.ndarray, processes: Processes = ALONE) -> np.ndarray:
    """How many rows are in no fold, and in each fold, (1 + num_folds,), those of other processes included."""
    num_folds = int(processes.each(folds.max(initial=-1)).max()) + 1
    return processes.total(np.bincount(1 + folds, minlength=1 + num_folds))


def judging_folds(folds: np.ndarray, enough: int, processes: Processes = ALONE) -> np.ndarray:
    """The first folds that together have `enough` rows, (n,); rows of the other folds get -1.

    For choices, which need not be judged on all rows: no dictionary then has to be learned without the other folds.
    """
    sizes = np.cumsum(fold_sizes(folds, processes)[1:])
    num_used = 1 + int(np.searchsorted(sizes, min(enough, sizes[-1])))
    return folds if num_used == sizes.size else np.where(folds < num_used, folds, -1)


def each_fold(folds: np.ndarray | None, processes: Processes = ALONE) -> list[Holdout]:
    """The holdouts of a fit: no fold, and each fold alone."""
    return [()] if folds is None else [(), *((fold,) for fold in range(fold_sizes(folds, processes).size - 1))]


def kept_rows(rows: np.ndarray, folds: np.ndarray | None, holdouts: list[Holdout]) -> list[np.ndarray]:
    """For each holdout, the mask of the `rows` that are not held out, (rows.size,)."""
    return [np.ones(rows.size, dtype=bool) if folds is None else ~np.isin(folds[rows], out) for out in holdouts]


class Parts(NamedTuple):
    """Rows by the holdouts that keep them: the rows of a part are kept, or left out, together.

    `of_row`, (n,): the part of every row, -1 where all holdouts leave it out. `is_kept`, (H, P).
    """

    of_row: np.ndarray
    is_kept: np.ndarray

    @property
    def number(self) -> int:
        """Number of parts, P."""
        return int(self.is_kept.shape[1])

    @classmethod
    def of(
        cls, num_rows: int, folds: np.ndarray | None, holdouts: list[Holdout], processes: Processes = ALONE
    ) -> "Parts":
        """As few parts as there can be; the same in all processes."""
        if folds is None:
            return cls(np.zeros(num_rows, dtype=int), np.ones((len(holdouts), 1), dtype=bool))
        values = np.flatnonzero(fold_sizes(folds, processes)) - 1
        fold = np.searchsorted(values, folds)
        is_kept, part = np.unique(np.stack([~np.isin(values, out) for out in holdouts]), axis=1, return_inverse=True)
        used = is_kept.any(axis=0)
        number = np.where(used, np.cumsum(used) - 1, -1)
        return cls(number[part.ravel()][fold], is_kept[:, used])
