"""What features are divided by: units of their own where they need them, and noise scales."""

import dataclasses

import numpy as np

from geode_jax.learning.feature_noise import FeatureScales, learn_feature_scales
from geode_jax.learning.units import choose_units
from geode_jax.partition.metis import Partition
from geode_jax.rows.frame import Frame
from geode_jax.rows.view import Rows, divide
from geode_jax.settings import DictionarySettings


def noise_scales(
    x: Rows, cells: Partition, is_observed: np.ndarray | None, settings: DictionarySettings, seed: int
) -> FeatureScales:
    """The noise scales of the features of x, (n, D), from cells side by side, as the settings want them."""
    assert settings.feature_noise is not None
    assert settings.max_rank is not None
    options = dataclasses.asdict(settings.feature_noise)
    return learn_feature_scales(x, cells, settings.max_rank, is_observed, seed=seed, **options)


def units(x: Rows, settings: DictionarySettings, seed: int) -> np.ndarray:
    """Divisors of the features of x, (n, D) with NaN where missing: 1, unless features have noise scales of their own
    and held-out rows want units of their own too.
    """
    if settings.feature_noise is None:
        return np.ones(x.shape[1])
    assert settings.max_rank is not None
    assert settings.num_neighbors is not None
    assert settings.depth is not None
    assert settings.min_cell_size is not None
    return choose_units(
        x,
        lambda rows, cells, is_observed: noise_scales(rows, cells, is_observed, settings, seed),
        max_rank=settings.max_rank,
        num_neighbors=settings.num_neighbors,
        depth=settings.depth,
        min_cell_size=settings.min_cell_size,
        seed=seed,
    )


def divide_by_units(x: Rows, frame: Frame, settings: DictionarySettings, seed: int) -> tuple[Rows, Frame]:
    """The rows divided by their :func:`units`, where they lie if they are an array, and their frame after it."""
    divisors = units(x, settings, seed)
    if (divisors != 1.0).any():
        x = divide(x, divisors)
    return x, frame._replace(scale=frame.scale * divisors)
