"""Pictures: what is drawn, not how it looks."""

import numpy as np
import pytest
from conftest import ANY_NOISE_SLOW
from matplotlib.figure import Figure

import geode_jax
from geode_jax.interop.plots import (
    cells,
    dictionary_images,
    image_rows,
    inclusion_probabilities,
    interval_reliability,
    intrinsic_dimension,
    scale_weights,
)
from geode_jax.predict.rows import nodes_in_features


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


def test_scale_weights(ax, posterior):
    assert scale_weights(ax, posterior) is ax
    heights = [bar.get_height() for bar in ax.patches]
    np.testing.assert_allclose(heights, posterior.scale_weights.mean(axis=(0, 1, 2)))
    trees = [line.get_ydata() for line in ax.lines]
    np.testing.assert_allclose(trees, posterior.scale_weights.mean(axis=(1, 2)))


@ANY_NOISE_SLOW
def test_cells_are_the_covariances(ax, posterior, data):
    """The heaviest ellipse is that of its node's covariance, at the mean of log sigma and alpha2 / sigma2."""
    assert cells(ax, posterior, data, tree=1, features=(2, 4)) is ax
    node = int(np.exp(np.asarray(posterior.draws.log_weights[1])).mean(axis=(0, 1)).argmax())
    dictionary, draws = nodes_in_features(posterior).dictionary, posterior.draws
    root = np.eye(6) if posterior.noise_root is None else posterior.noise_root
    noise = np.exp(np.asarray(draws.log_sigma2[1])[..., dictionary.tree.scale[node]].mean())
    signal = noise * np.expm1(np.asarray(draws.neg_log_u[1])[..., node, :])
    basis = np.asarray(dictionary.bases[1, node])[[2, 4]]
    covariance = (basis * signal.mean(axis=(0, 1))) @ basis.T + noise * (root @ root)[np.ix_([2, 4], [2, 4])]
    covariance *= np.outer(posterior.scale[[2, 4]], posterior.scale[[2, 4]])
    heaviest = max(ax.lines[1:], key=lambda line: line.get_alpha() or 0.0)
    outline = heaviest.get_xydata()[:-1]  # two standard deviations all around, the last point being the first
    centre = posterior.shift[[2, 4]] + posterior.scale[[2, 4]] * np.asarray(dictionary.centres[1, node])[[2, 4]]
    np.testing.assert_allclose(outline.mean(axis=0), centre, rtol=1e-5)
    np.testing.assert_allclose(np.cov(outline.T, bias=True) / 2, covariance, rtol=1e-4)
    with pytest.raises(ValueError, match="tree: expected a number below 2, got 2"):
        cells(ax, posterior, tree=2)
    with pytest.raises(ValueError, match="features: expected 2 different numbers below 6"):
        cells(ax, posterior, features=(0, 6))
    with pytest.raises(ValueError, match="features: expected 2 different numbers below 6"):
        cells(ax, posterior, features=(1, 1))
    with pytest.raises(TypeError, match=r"features: expected an integer, got 0\.0"):
        cells(ax, posterior, features=(0.0, 1))


def test_cells_in_three_dimensions(posterior, data):
    """Three great ellipses for every ellipse."""
    flat, solid = Figure().subplots(), Figure().subplots(subplot_kw={"projection": "3d"})
    cells(flat, posterior, data)
    assert cells(solid, posterior, data, features=(0, 1, 2)) is solid
    ellipses, great = (sum(line.get_alpha() is not None for line in ax.lines[1:]) for ax in (flat, solid))
    assert great == 3 * ellipses > 0
    with pytest.raises(ValueError, match="features: expected 3 different numbers below 6"):
        cells(solid, posterior)


def test_dictionary_images(ax, posterior):
    assert dictionary_images(ax, posterior, (2, 3), nodes=[0, 1], num_directions=2) is ax
    found, dictionary = np.asarray(ax.images[0].get_array()), posterior.dictionary
    centres = posterior.shift + posterior.scale * np.asarray(dictionary.centres[0, :2])
    middle, half = (centres.max() + centres.min()) / 2, (centres.max() - centres.min()) / 2
    expected = np.full((6, 11), np.nan)
    for node, centre in enumerate(centres):
        top = slice(4 * node, 4 * node + 2)
        expected[top, :3] = centre.reshape(2, 3)
        for number in range(2):
            direction = posterior.scale * np.asarray(dictionary.bases[0, node, :, number])
            image = middle + half * direction / np.abs(direction).max()
            expected[top, 4 * (number + 1) : 4 * (number + 1) + 3] = image.reshape(2, 3)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    np.testing.assert_allclose(ax.images[0].get_clim(), [centres.min(), centres.max()])
    assert [label.get_text() for label in ax.get_yticklabels()] == ["node 0", "node 1"]


def test_bad_dictionary_images(ax, posterior):
    for arguments, message in (
        ({"tree": 2, "nodes": [0]}, "tree: expected a number below 2, got 2"),
        ({"nodes": [0, 500]}, r"nodes: expected different nodes of the tree, got \[500\]"),
        ({"nodes": [-1]}, r"nodes: expected an integer of at least 0, got -1"),
        ({"nodes": [1, 1]}, r"nodes: expected different nodes of the tree, got \[1, 1\]"),
        ({"nodes": []}, r"nodes: expected different nodes of the tree, got \[\]"),
    ):
        with pytest.raises(ValueError, match=message):
            dictionary_images(ax, posterior, (2, 3), **arguments)
    for shape, message in (((2, 4), r"that of 6 pixels, got \(2, 4\)"), ((-2, -3), "an integer of at least 1, got -2")):
        with pytest.raises(ValueError, match=f"shape: expected {message}"):
            dictionary_images(ax, posterior, shape, nodes=[0])
    with pytest.raises(TypeError, match=r"nodes: expected an integer, got 0\.0"):
        dictionary_images(ax, posterior, (2, 3), nodes=[0.0])
    with pytest.raises(ValueError, match="num_directions: expected an integer of at least 0, got -1"):
        dictionary_images(ax, posterior, (2, 3), nodes=[0], num_directions=-1)


def test_interval_reliability(ax, posterior, data):
    hidden = np.random.default_rng(0).random(data.shape) < 0.3
    assert interval_reliability(ax, posterior, data, hidden) is ax
    promised, kept = ax.lines[1].get_data()
    assert np.abs(kept - promised).max() < 0.15
    assert (np.diff(kept) >= 0).all()
    with pytest.raises(ValueError, match="hidden: expected a boolean mask"):
        interval_reliability(ax, posterior, data, hidden[:3])
    with pytest.raises(ValueError, match="hidden: expected some hidden entries, got none"):
        interval_reliability(ax, posterior, data, np.zeros_like(hidden))


@pytest.mark.parametrize("plot", [inclusion_probabilities, scale_weights, cells])
def test_what_is_no_posterior(ax, plot):
    with pytest.raises(TypeError, match="posterior: expected Posterior, got GeodeDensity"):
        plot(ax, geode_jax.GeodeDensity())
