"""The processes that the rows are divided among, and what they must tell each other.

Each process holds a contiguous part of all rows, and learns from its own. What it needs of the others' are sums over
all rows, and a few rows: both are sums over processes. So all processes come to the same trees and dictionaries, those
that one process with all rows would learn, up to the order of summation.

Every process must ask for the same sums in the same order. So functions that ask for one are not called from threads.
"""

import dataclasses
from collections.abc import Callable

import numpy as np

from geode_jax.rows.products import BY_NUMPY, Products

# Numbers of other processes' rows that are in memory twice, in float64.
NUMBERS_AT_ONCE = 2**22


@dataclasses.dataclass(frozen=True, eq=False)
class Processes:
    """P processes.

    `sizes`: how many rows each holds. `index`: which of them this is. `add`: gives the sum of everyone's arrays, (m,)
    in float64; None where one process holds all rows. `products`: how this process computes those of its rows.
    """

    sizes: tuple[int, ...]
    index: int
    add: Callable[[np.ndarray], np.ndarray] | None
    products: Products = BY_NUMPY

    @property
    def is_alone(self) -> bool:
        """Whether this process holds all rows; then all methods return at once what they are given."""
        return self.add is None

    @property
    def start(self) -> int:
        """How many rows come before those of this process."""
        return sum(self.sizes[: self.index])

    def count(self, num_own: int) -> int:
        """The number of all rows, where this process holds `num_own`."""
        return num_own if self.is_alone else sum(self.sizes)

    def total(self, values: np.ndarray) -> np.ndarray:
        """The sum of everyone's array, of one shape; in float64, or int64 if they are integers."""
        if self.add is None:
            return values
        found = self.add(values.astype(np.float64).ravel()).reshape(values.shape)
        return found.astype(np.int64) if np.issubdtype(values.dtype, np.integer) else found

    def each(self, values: np.ndarray) -> np.ndarray:
        """Everyone's array of one shape, along a new first axis, (P, ...)."""
        if self.is_alone:
            return values[None]
        found = np.zeros((len(self.sizes), *values.shape), values.dtype)
        found[self.index] = values
        return self.total(found)

    def lowest(self, values: np.ndarray) -> np.ndarray:
        """The least of everyone's finite values."""
        return -self.highest(-values)

    def highest(self, values: np.ndarray) -> np.ndarray:
        """The largest of everyone's finite values; -inf where there are none."""
        is_finite = self.each(np.isfinite(values).astype(int)) > 0
        return np.where(is_finite, self.each(np.nan_to_num(values, posinf=0.0, neginf=0.0)), -np.inf).max(axis=0)

    def before_and_total(self, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Of numbers of rows of any kind: how many the processes before this one have, and how many all have."""
        everyones = self.each(counts)
        return everyones[: self.index].sum(axis=0), everyones.sum(axis=0)

    def joined(self, values: np.ndarray) -> np.ndarray:
        """Everyone's array along the first axis, in the order of the processes; their lengths may differ."""
        if self.is_alone:
            return values
        before, total = (int(number) for number in self.before_and_total(np.array(len(values))))
        found = np.empty((total, *values.shape[1:]), values.dtype)
        step = max(1, NUMBERS_AT_ONCE // max(1, int(np.prod(values.shape[1:]))))
        for start in range(0, total, step):
            part = np.zeros(found[start : start + step].shape)
            first, last = max(start, before), min(start + len(part), before + len(values))
            if first < last:
                part[first - start : last - start] = values[first - before : last - before]
            found[start : start + step] = self.total(part)
        return found

    def own(self, rows: np.ndarray) -> np.ndarray:
        """Those of the given `rows`, ascending, that this process holds, counted from its first."""
        if self.is_alone:
            return rows
        own = rows - self.start
        return own[(own >= 0) & (own < self.sizes[self.index])]

    def own_part(self, table: np.ndarray) -> np.ndarray:
        """The part of a table of everyone's rows that is about the rows of this process."""
        return table if self.is_alone else table[self.start : self.start + self.sizes[self.index]].copy()

    def sample(self, rows: np.ndarray, largest: int) -> np.ndarray:
        """Those of `rows` that are in a sample of at most `largest` of everyone's, as :func:`sample_part` has it."""
        return sample_part(rows, largest, *self.before_and_total(np.array(rows.size)))


ALONE = Processes((), 0, None)


def sample_part(rows: np.ndarray, largest: int, before: np.ndarray, total: np.ndarray) -> np.ndarray:
    """The part in `rows` of a sample of `total` rows, of which these come after `before` others.

    One row at random of every one of `largest` equal stretches: of rows in turns, as before and after, those at even
    distances could all be of one kind. The same rows in every process.
    """
    number = min(int(total), largest)
    if number == int(total):
        return rows
    edges = np.arange(number + 1) * int(total) // number
    within = np.random.default_rng(int(total)).random(number)
    place = edges[:-1] + (within * np.diff(edges)).astype(int) - int(before)
    return rows[place[(place >= 0) & (place < rows.size)]]
