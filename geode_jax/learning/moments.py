"""Counts, means and scatters of cells: read once at the lowest cells, and summed upwards.

Every scale of a tree has all rows, and every holdout has most of them. So a cell's rows are split into *parts*, which
the same holdouts keep. A cell's moments under a holdout are the sum of those of the parts that it keeps, and a node's
parts are the sums of its children's. Rows are read once for as many scales as memory allows.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from geode_jax._runtime.threads import parallel_map
from geode_jax.partition.metis import Partition
from geode_jax.rows.folds import Parts
from geode_jax.rows.processes import NUMBERS_AT_ONCE, Processes
from geode_jax.rows.products import BY_NUMPY, Products
from geode_jax.rows.view import Rows

# Memory for the moments of several scales. Where those of one scale take more, each node reads its own rows.
MOMENT_BYTES = 2**28


class Moments(NamedTuple):
    """Of the rows of P parts of a cell, in float64.

    Their number (P,), mean (P, D), scatter about it (P, D, D), and the largest absolute value of all.
    """

    num_rows: np.ndarray
    mean: np.ndarray
    scatter: np.ndarray
    largest: float

    def kept(self, is_kept: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Mean, (D,), and scatter, (D, D), of the parts that are kept, (P,), of which one at least has rows."""
        num_rows = self.num_rows * is_kept
        mean = num_rows / num_rows.sum() @ self.mean
        between = np.sqrt(num_rows)[:, None] * (self.mean - mean)
        return mean, self.scatter[is_kept].sum(axis=0) + between.T @ between


def joined(one: Moments, other: Moments) -> Moments:
    """The moments of both cells' rows together, part by part.

    A sum of positive terms (Chan, Golub & LeVeque, Algorithms for computing the sample variance, 1983): no digits are
    lost where rows are far from the origin, or close together.
    """
    num_rows = one.num_rows + other.num_rows
    share = other.num_rows / np.maximum(num_rows, 1)
    apart = other.mean - one.mean
    between = np.sqrt(one.num_rows * share)[:, None] * apart
    scatter = between[:, :, None] * between[:, None, :]
    scatter += one.scatter
    scatter += other.scatter
    return Moments(num_rows, one.mean + share[:, None] * apart, scatter, max(one.largest, other.largest))


def moments_of(x: Rows, rows: np.ndarray, products: Products = BY_NUMPY) -> Moments:
    """Moments of some rows of x, (n, D), as one part; in blocks: no copy of the rows is made."""
    num_features = x.shape[1]
    found: Moments | None = None
    for some in products.blocks(rows.size, num_features):
        block = x[rows[some]]
        mean, scatter = products.moments(block)
        own = Moments(np.array([len(block)]), mean[None], scatter[None], float(np.abs(block).max()))
        found = own if found is None else joined(found, own)
    if found is None:
        return Moments(np.zeros(1, int), np.zeros((1, num_features)), np.zeros((1, num_features, num_features)), 0.0)
    return found


def over_processes(own: Sequence[Moments], processes: Processes) -> list[Moments]:
    """Moments of everyone's rows, where each process has those of its own; as in :func:`joined` no digits are lost."""
    if processes.is_alone or not own:
        return list(own)
    num_own, means = np.stack([one.num_rows for one in own]), np.stack([one.mean for one in own])
    num_rows = processes.total(num_own)
    centres = processes.total(num_own[..., None] * means) / np.maximum(num_rows, 1)[..., None]
    largest = processes.each(np.array([one.largest for one in own])).max(axis=0).tolist()

    def about_centre(one: Moments, centre: np.ndarray) -> np.ndarray:
        apart = np.sqrt(one.num_rows)[:, None] * (one.mean - centre)
        return one.scatter + apart[:, :, None] * apart[:, None, :]

    scatters: list[np.ndarray] = []
    step = max(1, NUMBERS_AT_ONCE // own[0].scatter.size)
    for start in range(0, len(own), step):
        some = zip(own[start : start + step], centres[start : start + step], strict=True)
        scatters.extend(processes.total(np.stack([about_centre(*pair) for pair in some])))
    return [Moments(*parts) for parts in zip(num_rows, centres, scatters, largest, strict=True)]


def as_parts(found: Sequence[Moments]) -> Moments:
    """Moments of single parts as those of one cell."""
    if len(found) == 1:
        return found[0]
    num_rows, mean, scatter = (np.concatenate(tables) for tables in zip(*(part[:3] for part in found), strict=True))
    return Moments(num_rows, mean, scatter, max(part.largest for part in found))


class MomentSums:
    """Moments of a tree's cells by part, for callers that go through the scales from the root down.

    `nodes`: the cells that are to be asked for, each once.
    """

    def __init__(self, x: Rows, partition: Partition, parts: Parts, nodes: Iterable[int]) -> None:
        self._x, self._partition, self._parts = x, partition, parts
        self._wanted = set(nodes)  # and not summed yet
        self._known: dict[int, Moments] = {}

    def reach(self, scale: int) -> None:
        """Sum the moments of the cells at `scale`, if that was not done, and of the scales below that fit in memory."""
        most = MOMENT_BYTES // (8 * self._parts.number * self._x.shape[1] ** 2)
        band: set[int] = set()
        # no further than the tree: cells that are not nested, as those of `middle_cells`, have nothing to sum
        for deeper in range(scale, self._partition.depth + 1):
            nodes = self._wanted.intersection(range(2**deeper - 1, 2 ** (deeper + 1) - 1))
            if not nodes or len(band) + len(nodes) > most:
                break
            band |= nodes
        if band:
            self._sum_upwards(band)
        if not self._partition.processes.is_alone:  # few sums over processes instead of one for every cell
            rest = sorted(node for node in self._wanted if (node + 1).bit_length() - 1 == scale)
            if len(rest) <= most:
                self._known |= dict(zip(rest, self._read(rest), strict=True))
                self._wanted -= set(rest)

    def _sum_upwards(self, band: set[int]) -> None:
        """Read the lowest cells of the band, and sum the others from them."""
        lowest = list(self._lowest(sorted(band), band))
        read = dict(zip(lowest, self._read(lowest), strict=True))
        for node in sorted(band, reverse=True):  # children before their parents
            if node not in read:
                read[node] = joined(read[2 * node + 1], read[2 * node + 2])
        self._known |= {node: read[node] for node in band}
        self._wanted -= band

    def take(self, node: int) -> Moments:
        """The moments of a cell's parts, which are not held any longer."""
        known = self._known.pop(node, None)
        return self._read([node])[0] if known is None else known

    def _lowest(self, nodes: Sequence[int], band: set[int]) -> Iterable[int]:
        """The cells whose rows are read: those of the band, or their siblings, with no child in it."""
        for node in nodes:
            children = (2 * node + 1, 2 * node + 2)
            if band.isdisjoint(children):
                yield node
            else:
                yield from (child for child in children if child not in band)

    def _read(self, nodes: Sequence[int]) -> list[Moments]:
        number, part = self._parts.number, self._parts.of_row
        cells = [self._partition.cell(node) for node in nodes]
        pieces = [rows[part[rows] == own] for rows in cells for own in range(number)]
        processes = self._partition.processes
        found = parallel_map(lambda rows: moments_of(self._x, rows, processes.products), pieces)
        own = [as_parts(found[start : start + number]) for start in range(0, len(found), number)]
        return over_processes(own, processes)
