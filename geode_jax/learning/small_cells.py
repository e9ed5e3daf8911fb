"""Centres and leading directions of many small cells at once, as stacks of small matrices.

One after the other, such cells take longer in Python than in LAPACK, and Python runs on one core at a time: on a
machine with many cores more threads made stage one slower. A stack is a few calls, during which other threads run.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from scipy import linalg

from geode_jax._runtime.blas import one_blas_thread
from geode_jax.learning.moments import Moments

# Numbers that a stack may hold, 4 MiB: every core has a stack at a time. A cell that needs more is learned by itself.
STACK_NUMBERS = 2**19
# Cells of a stack are padded to the side of its largest one, which is at most this many times that of its smallest.
MOST_PADDING = 1.15
# Directions are orthonormal if their squared lengths are 1 up to so many units of the last place: 1e-6 in float32.
LENGTH_ULPS = 8


class Priors(NamedTuple):
    """Scatters that are added to those of B cells under H holdouts: zeros are no directions.

    `directions` (B, H, D, r), orthonormal or zero; `variances` (B, H, r).
    """

    directions: np.ndarray
    variances: np.ndarray

    @property
    def columns(self) -> np.ndarray:
        """Columns whose outer products sum to the scatters, (B, H, D, r)."""
        return np.sqrt(self.variances)[:, :, None, :] * self.directions


class Limits(NamedTuple):
    """Of B cells: how many directions they may have, `ranks` (B,), and which singular values are rounding error.

    These are at or below `own` (B,), or `relative` (B,) times the largest one.
    """

    ranks: np.ndarray
    own: np.ndarray
    relative: np.ndarray

    def is_useful(self, singular: np.ndarray) -> np.ndarray:
        """Which of the descending singular values, (B, H, d), belong to directions that are kept."""
        limit = np.maximum(singular[:, :, 0] * self.relative[:, None], self.own[:, None])
        return (singular > limit[:, :, None]) & (np.arange(singular.shape[2]) < self.ranks[:, None, None])


class Stack(NamedTuple):
    """What is learned of B cells: `centres` (B, H, D), `directions` (B, H, D, d), `variances` (B, H, d), not divided by
    numbers of rows; `ranks` (B, H). Columns beyond the ranks are zero.
    """

    centres: np.ndarray
    directions: np.ndarray
    variances: np.ndarray
    ranks: np.ndarray


class Size(NamedTuple):
    """Numbers of rows and of inherited directions, to which cells of a stack are padded.

    Where moments stand for the rows, of cells with more rows than features D, `num_rows` is D.
    """

    num_rows: int
    inherited: int

    def side(self, num_features: int) -> int:
        """Side of the matrix whose eigenvectors are a cell's directions."""
        return num_features if num_features == self.num_rows else self.num_rows + self.inherited

    def numbers(self, num_features: int, num_holdouts: int, rank: int) -> int:
        """About how many numbers a stack holds for each cell."""
        directions = num_features * (rank + self.inherited)
        return self.num_rows * num_features + num_holdouts * (directions + 3 * self.side(num_features) ** 2)


def in_stacks(cells: Mapping[int, Size], num_features: int, num_holdouts: int, rank: int) -> list[list[int]]:
    """Nodes in groups of about the same side, as large as `STACK_NUMBERS` allows: the same on every machine.

    Cells that need more by themselves are in none.
    """
    found: list[list[int]] = []
    widest, smallest = Size(0, 0), 0
    for side, node in sorted((size.side(num_features), node) for node, size in cells.items()):
        size = cells[node]
        if size.numbers(num_features, num_holdouts, rank) > STACK_NUMBERS:
            continue
        padded = Size(max(size.num_rows, widest.num_rows), max(size.inherited, widest.inherited))
        number = padded.numbers(num_features, num_holdouts, rank) * (len(found[-1]) + 1 if found else 1)
        if not found or number > STACK_NUMBERS or padded.side(num_features) > MOST_PADDING * smallest + 1:
            found.append([])
            padded, smallest = size, side
        found[-1].append(node)
        widest = padded
    return found


@one_blas_thread()
def stack_by_moments(cells: Sequence[Moments], is_kept: np.ndarray, priors: Priors, limits: Limits) -> Stack:
    """From the moments of the cells' parts, of which the holdouts keep some, (H, P)."""
    num_rows = np.stack([cell.num_rows for cell in cells])[:, None, :] * is_kept
    means = np.stack([cell.mean for cell in cells])
    scatters = np.stack([cell.scatter for cell in cells])
    num_cells, num_parts, num_features = means.shape
    centres = (num_rows / num_rows.sum(axis=2, keepdims=True)) @ means
    between = np.sqrt(num_rows)[..., None] * (means[:, None] - centres[:, :, None])
    scatter = is_kept.astype(float) @ scatters.reshape(num_cells, num_parts, -1)
    scatter = scatter.reshape(num_cells, -1, num_features, num_features)
    scatter += between.swapaxes(2, 3) @ between
    if priors.variances.size:
        scatter += (priors.directions * priors.variances[:, :, None, :]) @ priors.directions.swapaxes(2, 3)
    values, vectors = _leading(scatter, limits)
    useful = limits.is_useful(np.sqrt(np.maximum(values, 0.0)))
    return Stack(centres, vectors * useful[:, :, None, :], values * useful, useful.sum(axis=2))


@one_blas_thread()
def stack_by_rows(rows: Sequence[np.ndarray], kept: Sequence[np.ndarray], priors: Priors, limits: Limits) -> Stack:
    """From Gram matrices of the cells' rows, (n_b, D), of which the holdouts keep some, (H, n_b)."""
    most, num_cells, num_holdouts = max(map(len, rows)), len(rows), kept[0].shape[0]
    # one more row than the largest cell has, of zeros, stands for rows that are not there
    block = np.zeros((num_cells, most + 1, rows[0].shape[1]))
    mask = np.zeros((num_cells, num_holdouts, most + 1), dtype=bool)
    origins = np.empty((num_cells, 1, rows[0].shape[1]))
    for number, (own, is_kept) in enumerate(zip(rows, kept, strict=True)):
        origins[number] = own.mean(axis=0, dtype=np.float64)
        block[number, : len(own)] = own - origins[number]
        mask[number, :, : len(own)] = is_kept
    count = mask.sum(axis=2)
    length = int(count.max())
    at = np.argsort(~mask, axis=2, kind="stable")[:, :, :length]
    is_row = np.arange(length) < count[:, :, None]
    at = np.where(is_row, at, most)
    gram = block @ block.swapaxes(1, 2)
    inner = gram[np.arange(num_cells)[:, None, None, None], at[:, :, :, None], at[:, :, None, :]]
    row_mean = inner.sum(axis=3) / count[:, :, None]
    inner -= row_mean[..., None]
    inner += ((row_mean.sum(axis=2) / count)[:, :, None] - row_mean)[:, :, None, :]
    inner *= is_row[..., None] & is_row[:, :, None, :]
    num_extra = priors.variances.shape[2]
    side = length + num_extra
    whole = np.zeros((num_cells, num_holdouts, side, side))
    whole[:, :, :length, :length] = inner
    inherited = priors.columns
    if num_extra:
        across = np.take_along_axis(block[:, None] @ inherited, at[..., None], axis=2)
        across = (across - across.sum(axis=2, keepdims=True) / count[:, :, None, None]) * is_row[..., None]
        whole[:, :, length:, :length] = across.swapaxes(2, 3)  # the lower triangle is what is read
        diagonal = np.arange(length, side)
        whole[:, :, diagonal, diagonal] = priors.variances
    values, vectors = _leading(whole, limits)
    singular = np.sqrt(np.maximum(values, 0.0))
    useful = limits.is_useful(singular)
    vectors = vectors * np.where(useful, 1.0 / np.where(useful, singular, 1.0), 0.0)[:, :, None, :]
    own = vectors[:, :, :length] * is_row[..., None]
    own -= own.sum(axis=2, keepdims=True) / count[:, :, None, None]  # centred, so that the rows' mean drops out
    weight = np.zeros((num_cells, num_holdouts, most + 1, values.shape[2]))
    np.put_along_axis(weight, at[..., None], own, axis=2)
    directions = block.swapaxes(1, 2)[:, None] @ weight
    if num_extra:
        directions += inherited @ vectors[:, :, length:]
    if (is_off := ~are_orthonormal(directions, useful, rows[0].dtype)).any():
        directions[is_off] = _orthonormal(directions[is_off], useful[is_off])
    centres = origins + (mask / count[:, :, None]) @ block
    return Stack(centres, directions, values * useful, useful.sum(axis=2))


def _leading(matrices: np.ndarray, limits: Limits) -> tuple[np.ndarray, np.ndarray]:
    """The largest eigenvalues, descending, as many as any cell may have, and their vectors as columns."""
    values, vectors = np.linalg.eigh(matrices)
    rank = min(int(limits.ranks.max()), values.shape[2])
    return values[..., ::-1][..., :rank], vectors[..., ::-1][..., :rank]


def are_orthonormal(directions: np.ndarray, useful: np.ndarray | bool, dtype: np.dtype) -> np.ndarray:
    """Whether directions from Gram matrices, (..., D, d), are orthonormal as far as `dtype` can tell: (...).

    Where the spectrum is steep, those of small variance are not: Gram matrices square rounding errors, and inherited
    directions have errors of their own. Both show in the lengths of the `useful` ones, (..., d) or all.
    """
    squares = np.einsum("...ij,...ij->...j", directions, directions)
    return np.asarray((np.abs(squares - 1.0) <= LENGTH_ULPS * np.finfo(dtype).eps).all(axis=-1, where=useful))


def _orthonormal(directions: np.ndarray, useful: np.ndarray) -> np.ndarray:
    """Directions, (B, D, d), made orthonormal by the Cholesky factors of their inner products, or by QR.

    As that of one cell in `subspaces.py`; those that are not `useful`, (B, d), are zero.
    """
    inner = directions.swapaxes(1, 2) @ directions
    number = np.arange(useful.shape[1])
    inner[:, number, number] += ~useful
    apart = np.abs(inner - np.eye(useful.shape[1])).max(axis=(1, 2), initial=0.0)
    is_far = apart > 0.1 / np.maximum(useful.sum(axis=1), 1)
    inner[is_far] = np.eye(useful.shape[1])
    inverse = np.linalg.inv(np.linalg.cholesky(inner))
    found = directions @ inverse.swapaxes(1, 2)
    for place in np.flatnonzero(is_far).tolist():
        rank = int(useful[place].sum())
        found[place][:, :rank] = linalg.qr(directions[place][:, :rank], mode="economic")[0]
    return found
