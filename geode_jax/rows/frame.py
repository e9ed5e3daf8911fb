"""Model coordinates: data shifted and scaled, so that the prior means the same in any unit."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from geode_jax._runtime.warning import warn_user
from geode_jax.rows.blocks import slices
from geode_jax.rows.files import RowFiles
from geode_jax.rows.processes import ALONE, Processes
from geode_jax.rows.view import View

# Bounds on model coordinates, where the data have an overall variance of 1: sums of their squares are finite. Rows
# beyond count as if they were there.
FARTHEST = {"float32": 1e15, "float64": 1e140}
# A feature that varies by less than this share of them all has a unit of its own: float32 could not hold it.
LEAST_SPREAD = 1e-30
# The unit is the data's root-mean-square deviation, unless it is more than FAR times that of the row which all but
# FAR_SHARE of the rows are nearer than: a few rows, as codes of missing values in all columns, would set the unit of
# all. (Of a Gaussian column it is 0.5 times; heavy tails may pass 3.)
FAR, FAR_SHARE = 3.0, 0.05
# In that unit float32 would not tell apart rows that are so many times as far. If more than LOST_SHARE of the rows are,
# the root-mean-square deviation remains the unit.
LOST, LOST_SHARE = 1e12, 0.01
# Rows from which that is estimated.
SOME_ROWS = 500


class Frame(NamedTuple):
    """Coordinates of the model: ``x = R^{-1} (y - shift) / scale``, shift and scale of shape (D,), float64.

    `features`, (V,): those that x has, in their order; None where it has all D. The model is one of the features that
    vary. `root` is the symmetric R, (V, V), of determinant 1; None where it is the identity.
    """

    shift: np.ndarray
    scale: np.ndarray
    root: np.ndarray | None = None
    features: np.ndarray | None = None

    @property
    def inverse_root(self) -> np.ndarray | None:
        """R^{-1}, (V, V)."""
        return None if self.root is None else np.linalg.inv(self.root)

    @property
    def is_left_out(self) -> np.ndarray:
        """Which features x does not have, (D,)."""
        found = np.zeros(self.shift.size, dtype=bool)
        if self.features is not None:
            found[:] = True
            found[self.features] = False
        return found

    def place_of(self, features: np.ndarray) -> np.ndarray:
        """Where x has these features, which are among its own."""
        return features if self.features is None else np.searchsorted(self.features, features)

    def divided(self, divisors: np.ndarray) -> "Frame":
        """The frame of ``x / divisors``."""
        scale = self.scale.copy()
        scale[~self.is_left_out] *= divisors
        return self._replace(scale=scale)

    def in_all_features(self, values: np.ndarray, axis: int = 0) -> np.ndarray:
        """An array with 0 for the features that x does not have; its `axis` is that of the features."""
        if self.features is None:
            return values
        shape = list(values.shape)
        shape[axis] = self.shift.size
        found = np.zeros(shape, values.dtype)
        np.moveaxis(found, axis, 0)[self.features] = np.moveaxis(values, axis, 0)
        return found


def learn_frame(data: np.ndarray | RowFiles, processes: Processes = ALONE) -> Frame:
    """Shift to the column means, divide by the root-mean-square deviation, both over the observed entries.

    Where a few rows are so far off that they would set both (:data:`FAR`), medians and the deviation of the others are
    used. A warning tells of a row that has most of all squared deviations.

    A column that varies by less than `LEAST_SPREAD` of that is divided by its own largest deviation. Every column needs
    an observed entry. A column that never varies is left out of model coordinates: it tells nothing of the noise, which
    would seem smaller than it is. It is shifted by its value, so that it is exactly 0 whatever its size. Raises
    ValueError if no column varies: there is no spread to set a unit by.
    """
    total, count = np.zeros(data.shape[1]), np.zeros(data.shape[1])
    lowest, highest = np.full(data.shape[1], np.inf), np.full(data.shape[1], -np.inf)
    with np.errstate(over="ignore", invalid="ignore"):
        for block in _blocks(data):
            seen = ~np.isnan(block)
            total += np.where(seen, block, 0.0).sum(axis=0, dtype=np.float64)
            count += seen.sum(axis=0)
            lowest, highest = np.fmin(lowest, np.fmin.reduce(block)), np.fmax(highest, np.fmax.reduce(block))
        total, count = processes.total(total), processes.total(count)
        # of a process without rows they are infinite
        lowest, highest = processes.lowest(lowest), processes.highest(highest)
        shift = np.where(lowest == highest, lowest, total / count)
        spread = np.maximum(highest - shift, shift - lowest)
        largest = float(spread.max())
    if not np.isfinite(largest):
        raise ValueError("X: expected smaller values: their sums, or their deviations from the column means, overflow")
    if (lowest == highest).all():
        raise ValueError("X: expected at least two different rows, but all rows are equal")
    features = np.flatnonzero(lowest != highest) if (lowest == highest).any() else None
    varying = slice(None) if features is None else features
    squares, farthest = 0.0, (0.0, 0, 1)
    for rows in slices(*data.shape):
        block = _columns(data[rows], features)
        if features is not None and (tells_nothing := np.isnan(block).all(axis=1)).any():
            number = rows.start + int(np.argmax(tells_nothing))
            raise ValueError(f"X: expected observed values of features that vary, but row {number} has none")
        of_rows = np.nansum(np.square((block - shift[varying]) / largest), axis=1)
        squares += of_rows.sum()
        if of_rows.size:
            row = int(of_rows.argmax())
            farthest = max(farthest, (float(of_rows[row]), rows.start + row, int((~np.isnan(block[row])).sum())))
    squares = float(processes.total(np.array(squares, np.float64)))
    scale = largest * np.sqrt(squares / count[varying].sum())
    medians, usual = _usual(data, shift, lowest != highest, processes)
    has_far_rows = scale > FAR * usual > 0.0
    if has_far_rows:
        scale, shift = usual, medians
        spread = np.maximum(highest - shift, shift - lowest)
    # that of the smallest numbers may be 0 in float64
    scale = max(scale, np.finfo(np.float64).tiny)
    is_small = (spread > 0.0) & (spread < LEAST_SPREAD * scale)
    if has_far_rows and farthest[0] > 0.5 * squares:
        square, number, seen = farthest
        row, times = processes.start + number, largest * (np.sqrt(square / seen) / usual)
        warn_user(
            f"X: row {row} is {times:.0e} times as far from the mean as most rows, and may spoil the density of others;"
            " leave it out, or set to NaN what is no measurement"
        )
    return Frame(shift, np.where(is_small, spread, scale), features=features)


def _usual(
    data: np.ndarray | RowFiles, shift: np.ndarray, is_varying: np.ndarray, processes: Processes
) -> tuple[np.ndarray, float]:
    """Medians of the columns, (D,), and the deviation from them that a few rows may have more of, from some rows.

    It is the `1 - FAR_SHARE` quantile, over rows, of a row's root-mean-square deviation over its observed entries; 0
    where it says nothing. The median is `shift` for columns that do not vary, or of which these rows show nothing.
    """
    rows, medians = processes.sample(np.arange(data.shape[0]), SOME_ROWS), shift.copy()
    num_rows = min(processes.count(data.shape[0]), SOME_ROWS)
    # squares are over the largest of the row, so that none overflows and not all are 0
    largest, squares, seen = (np.zeros(num_rows) for _ in range(3))
    varying = np.flatnonzero(is_varying)
    for block in slices(varying.size, SOME_ROWS):
        some = varying[block]
        sample = processes.joined(data[np.ix_(rows, some)].astype(np.float64))
        is_seen = ~np.isnan(sample)
        known = is_seen.any(axis=0)
        median = np.median if is_seen.all() else np.nanmedian  # the latter takes several times as long
        medians[some[known]] = median(sample[:, known], axis=0)
        with np.errstate(over="ignore"):
            away = np.minimum(np.abs(np.where(is_seen, sample - medians[some], 0.0)), np.finfo(np.float64).max)
        before, largest = largest, np.maximum(largest, away.max(axis=1))
        unit = np.where(largest > 0.0, largest, 1.0)
        squares = squares * np.square(before / unit) + np.square(away / unit[:, None]).sum(axis=1)
        seen += is_seen.sum(axis=1)
    deviation = (largest * np.sqrt(squares / np.maximum(seen, 1.0)))[seen > 0]
    if deviation.size == 0:
        return medians, 0.0
    usual = float(np.quantile(deviation, 1.0 - FAR_SHARE))
    is_lost = deviation / LOST > usual
    return medians, usual if is_lost.mean() <= LOST_SHARE else 0.0


def to_model(data: np.ndarray | RowFiles, frame: Frame, dtype: np.dtype) -> np.ndarray:
    """The data in model coordinates, (n, D), or (n, V) for a frame of some features; NaN stays NaN.

    The subtraction is in float64, so that data far from the origin lose no digits. Coordinates are bounded, so that
    their squares are finite in this type.
    """
    shift, scale = (_columns(values, frame.features) for values in (frame.shift, frame.scale))
    x = np.empty((len(data), shift.size), dtype)
    inverse, farthest = frame.inverse_root, FARTHEST[x.dtype.name]
    for rows in slices(*data.shape):
        with np.errstate(over="ignore"):
            scaled = (_columns(data[rows], frame.features) - shift) / scale
        np.clip(scaled, -farthest, farthest, out=scaled)
        x[rows] = scaled if inverse is None else scaled @ inverse
    return x


def view_in_model(data: np.ndarray | RowFiles, frame: Frame, dtype: np.dtype) -> View:
    """:func:`to_model` as a view, which converts rows when they are indexed; only for frames without a root."""
    assert frame.root is None
    scale, shift = (_columns(values, frame.features) for values in (frame.scale, frame.shift))
    return View(data, scale, shift, dtype, frame.features)


def _columns(values: np.ndarray, features: np.ndarray | None) -> np.ndarray:
    """Values of some features, along the last axis, in C order; of all where `features` is None."""
    return values if features is None else values.take(features, axis=-1)


def to_data(x: np.ndarray, frame: Frame) -> np.ndarray:
    """The inverse of :func:`to_model`, in float64; values beyond its range become its largest ones.

    Features that x does not have get their shift.
    """
    scaled = np.asarray(x, np.float64)
    largest = np.finfo(np.float64).max
    with np.errstate(over="ignore"):
        scaled = scaled if frame.root is None else scaled @ frame.root
        found = frame.shift + frame.scale * frame.in_all_features(scaled, -1)
    return np.clip(found, -largest, largest)


def _blocks(data: np.ndarray | RowFiles) -> Iterator[np.ndarray]:
    return (data[rows] for rows in slices(*data.shape))
