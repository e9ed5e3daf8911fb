"""The rows that stage one learns from, with their folds, their mask of observed entries, and how they were filled.

A filled entry depends on the rows it was filled from, their noise included. So the dictionary without a fold is learned
from rows that were filled by dictionaries without that fold, if there are more than two folds. Were this not done, the
fold's held-out density would be too high, and choices made by it would take noise for directions. (`forest/fill.py`
says what dependence remains.)
"""

from typing import NamedTuple

import numpy as np

from geode_jax.rows.folds import Holdout, each_fold, judging_folds
from geode_jax.rows.processes import ALONE, Processes
from geode_jax.rows.row_space import Axes, axes_of, principal_coordinates, uses_row_space
from geode_jax.rows.unseen import Unseen
from geode_jax.rows.view import Overlay, Rows, as_array, divide, taken

# How far a row's observed features are from a subspace takes a product with all axes of the row space, where in R^D it
# takes one with the subspace's directions. So the axes, times the share of rows with missing entries, are at most this
# many times the directions: with more, coordinates took longer.
AXES_PER_DIRECTION = 4


class Training(NamedTuple):
    """Rows without missing entries.

    - `x`: (n, d'), the rows, or coordinates of them.
    - `num_features`: D, which is more than d' where `x` holds coordinates.
    - `folds`: fold of each row, (n,), -1 for a row in none; None where statistics are in sample.
    - `is_observed`: (n, D), which entries were not filled; None where none were.
    - `without`: for each fold, the rows that had missing entries, (n_m, d'), as filled by dictionaries without that
      fold; None where no entry was filled, or there are no more than two folds.
    - `processes`: those that the rows are divided among; `x`, `folds` and all indices are of this process's rows.
    - `axes`: where coordinates of rows of which some were filled are in R^D; else None.
    - `unseen`: what whitened rows with missing entries do not show, in place of these; None where none are whitened.
    """

    x: Rows
    num_features: int
    folds: np.ndarray | None = None
    is_observed: np.ndarray | None = None
    without: list[np.ndarray] | None = None
    processes: Processes = ALONE
    axes: Axes | None = None
    unseen: Unseen | None = None

    @property
    def num_rows(self) -> int:
        """Number of rows, those of other processes included."""
        return self.processes.count(self.x.shape[0])

    @property
    def holdouts(self) -> list[Holdout]:
        """No fold, and each fold alone."""
        return each_fold(self.folds, self.processes)

    @property
    def own_folds(self) -> np.ndarray:
        """The folds; raises ValueError if there are none."""
        if self.folds is None:
            raise ValueError("these rows have no folds")
        return self.folds

    def folds_of(self, rows: np.ndarray) -> np.ndarray:
        """Folds of some rows, (m,); all 0 if there are none."""
        return np.zeros(rows.size, dtype=int) if self.folds is None else self.folds[rows]

    def holdouts_of(self, rows: np.ndarray) -> np.ndarray:
        """Which of :attr:`holdouts` left out the fold of each of some rows, (m,); all 0 if there are no folds."""
        return np.zeros(rows.size, dtype=int) if self.folds is None else 1 + self.folds[rows]

    @property
    def mask(self) -> np.ndarray:
        """Which entries were not filled, (n, D)."""
        if self.is_observed is None:
            return np.ones((self.x.shape[0], self.num_features), dtype=bool)
        return self.is_observed

    @property
    def complete(self) -> np.ndarray:
        """Indices of the rows that had no missing entry."""
        return np.arange(self.x.shape[0]) if self.is_observed is None else np.flatnonzero(self.is_observed.all(axis=1))

    @property
    def partial(self) -> np.ndarray:
        """Indices of the rows that had missing entries."""
        return np.arange(0) if self.is_observed is None else np.flatnonzero(~self.is_observed.all(axis=1))

    def taken(self, rows: np.ndarray) -> "Training":
        """Only the given rows, ascending, of this and of all other processes; the result has no `without`."""
        join = self.processes.joined
        return Training(
            taken(self.x, rows) if self.processes.is_alone else join(self.x[rows]),
            self.num_features,
            None if self.folds is None else join(taken(self.folds, rows)),
            None if self.is_observed is None else join(taken(self.is_observed, rows)),
            axes=self.axes,
            unseen=None if self.unseen is None else self.unseen.taken(rows),
        )

    def _kept_of_partial(self) -> list[np.ndarray]:
        """For each fold, which of the partial rows are outside it: places in :attr:`partial`."""
        own = self.folds_of(self.partial)
        return [np.flatnonzero(own != fold) for fold in range(len(self.without or []))]

    def in_row_space(self, num_directions: int) -> "Training":
        """Rows of which some were filled, in coordinates along axes of the space that they span.

        It holds rows with missing entries as filled for every fold. Where that would save little, with so many
        directions to a subspace, and where no row was filled, the rows as they are.
        """
        kept, partial = self._kept_of_partial(), self.partial
        num_versions = self.num_rows + sum(rows.size for rows in kept)
        is_cheap = partial.size * num_versions <= AXES_PER_DIRECTION * num_directions * self.num_rows
        if self.is_observed is None or not (is_cheap and uses_row_space(num_versions, self.num_features)):
            return self
        outside = [filled[rows] for filled, rows in zip(self.without or [], kept, strict=True)]
        versions = np.concatenate([as_array(self.x), *outside]) if outside else as_array(self.x)
        space = principal_coordinates(versions)
        ends = np.cumsum([self.x.shape[0], *(rows.size for rows in kept)])
        own, *found = np.split(space.coordinates, ends[:-1])
        without = []
        for rows, coordinates in zip(kept, found, strict=True):
            filled = own[partial]  # a fold's own rows are not used without it
            filled[rows] = coordinates
            without.append(filled)
        return self._replace(x=own, without=without or None, axes=axes_of(versions, space))

    def divided(self, divisors: np.ndarray) -> "Training":
        """All rows divided by the divisors of the features, in place if they are arrays."""
        for filled in self.without or []:
            divide(filled, divisors)
        return self._replace(x=divide(self.x, divisors))

    def judging(self, enough: int) -> "Training":
        """The same rows with folds for only `enough` of them: those on which choices are judged."""
        return self._replace(folds=judging_folds(self.own_folds, enough, self.processes))

    def each(self, holdouts: list[Holdout]) -> list[tuple[Rows, list[Holdout]]]:
        """Pairs of rows and the holdouts whose dictionaries learn from them; one pair where no entry was filled."""
        if self.without is None:
            return [(self.x, holdouts)]
        return [(self.without_fold(*holdout) if holdout else self.x, [holdout]) for holdout in holdouts]

    def without_fold(self, fold: int) -> Rows:
        """Rows (n, d') from which the dictionary without the fold is learned; it uses only rows outside the fold."""
        return self.x if self.without is None else Overlay(self.x, self.partial, self.without[fold])
