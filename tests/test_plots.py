"""Pictures: what is drawn, not how it looks."""

import numpy as np
import pytest
from matplotlib.figure import Figure

import geode_jax
from geode_jax.interop.plots import image_rows, inclusion_probabilities, intrinsic_dimension


@pytest.fixture
def ax():
    return Figure().subplots()


def test_image_rows_mark_missing_pixels(ax):
    images = np.full((3, 6), 0.5)
    images[0, 2] = np.nan
    assert image_rows(ax, {"a": images, "b": images[:2]}, (2, 3), low=0.0, high=1.0) is ax
    assert [label.get_text() for label in ax.get_yticklabels()] == ["a", "b"]
    overlay = np.asarray(ax.images[1].get_array())
    assert (overlay[..., 3] > 0).sum() == 2


def test_inclusion_probabilities(ax, posterior):
    assert inclusion_probabilities(ax, posterior) is ax
    x, y = ax.lines[0].get_data()
    np.testing.assert_array_equal(x, [1, 2, 3])
    np.testing.assert_array_equal(y, posterior.inclusion_probabilities)


def test_intrinsic_dimension(ax, posterior, data):
    assert intrinsic_dimension(ax, posterior.intrinsic_dimension_probabilities) is ax
    heights = [bar.get_height() for bar in ax.patches]
    np.testing.assert_allclose(heights, posterior.intrinsic_dimension_probabilities)
    for probabilities in (
        posterior.node_dimension_probabilities[0],
        geode_jax.intrinsic_dimension(posterior, data[:4]),
    ):
        below = Figure().subplots()
        intrinsic_dimension(below, probabilities, what="node")
        np.testing.assert_allclose(below.images[0].get_array(), probabilities)
    with pytest.raises(ValueError, match=r"probabilities: expected 1 or 2 axes, got shape \(\)"):
        intrinsic_dimension(ax, np.float64(0.5))
