"""One shift and one scalar scale, so that the prior means the same in any unit."""

from typing import NamedTuple

import numpy as np


class Frame(NamedTuple):
    """Coordinates of the model: ``x = (y - shift) / scale``, both of shape (D,), float64."""

    shift: np.ndarray
    scale: np.ndarray


def learn_frame(data: np.ndarray) -> Frame:
    """Shift to the column means, divide by the root-mean-square deviation, both over the observed entries.

    Every column needs one. Raises ValueError where all rows are equal: there is no spread to set a unit by.
    """
    has_missing = np.isnan(data.min())
    mean, maximum = (np.nanmean, np.nanmax) if has_missing else (np.mean, np.max)  # the former copy the data
    shift = np.asarray(mean(data, axis=0, dtype=np.float64))
    deviation = data - shift
    largest = float(maximum(np.abs(deviation)))
    # Rounding of the mean leaves deviations of a few ulp in data without any spread.
    noise_floor = 8 * np.finfo(data.dtype).eps * float(maximum(np.abs(data)))
    if not np.isfinite(largest):
        raise ValueError("X: expected a finite spread, but deviations from the column means overflow")
    if largest <= noise_floor:
        raise ValueError("X: expected at least two different rows, but all rows are equal")
    deviation /= largest
    scale = largest * np.sqrt(mean(np.square(deviation)))
    return Frame(shift, np.full(data.shape[1], scale))


def to_model(data: np.ndarray, frame: Frame, dtype: np.dtype) -> np.ndarray:
    """Coordinates of the model, (n, D), NaN where the data are.

    The subtraction is in float64, so that a far-off origin costs no digits.
    """
    return ((data - frame.shift) / frame.scale).astype(dtype)
