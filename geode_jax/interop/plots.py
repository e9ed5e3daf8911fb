"""Plots, with matplotlib (``pip install "geode-jax[plots]"``)."""

import itertools
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from geode_jax._checks import check_data, check_instance, check_integer
from geode_jax._typing import ArrayLike
from geode_jax.posterior.posterior import Posterior
from geode_jax.predict.conditional import condition
from geode_jax.predict.rows import node_in_features, noise_between


def image_rows(ax: Axes, rows: Mapping[str, np.ndarray], shape: tuple[int, int], *, low: float, high: float) -> Axes:
    """Draw labelled rows of images on one axes; each array is (images, pixels), and NaN marks missing pixels.

    `low` and `high` are the values of black and white, the same for every image.
    """
    height, width = shape
    most = max(images.shape[0] for images in rows.values())
    step_down, step_right = height + 2, width + 1
    canvas = np.full((len(rows) * step_down - 2, most * step_right - 1), np.nan)
    hidden = np.zeros(canvas.shape, dtype=bool)
    for number, images in enumerate(rows.values()):
        for column, image in enumerate(images):
            place = np.s_[
                number * step_down : number * step_down + height,
                column * step_right : column * step_right + width,
            ]
            canvas[place] = image.reshape(shape)
            hidden[place] = np.isnan(canvas[place])
    ax.imshow(np.where(hidden, np.nan, canvas), cmap="gray", vmin=low, vmax=high, interpolation="nearest")
    overlay = np.zeros((*canvas.shape, 4))
    overlay[hidden] = (0.86, 0.37, 0.25, 1.0)
    ax.imshow(overlay, interpolation="nearest")
    ax.set_yticks([number * step_down + 0.5 * (height - 1) for number in range(len(rows))], list(rows))
    ax.set_xticks([])
    ax.tick_params(length=0)
    for spine in ax.spines.values():
        spine.set_visible(False)
    return ax


def inclusion_probabilities(ax: Axes, posterior: Posterior) -> Axes:
    """Draw the probability that direction m is active, for m = 1..d (the paper's figure 3)."""
    check_instance(posterior, "posterior", Posterior)
    chances = posterior.inclusion_probabilities
    ax.plot(np.arange(1, chances.size + 1), chances, "o-", markersize=4)
    ax.set(xlabel="direction", ylabel="inclusion probability", ylim=(-0.03, 1.03))
    return ax


def intrinsic_dimension(ax: Axes, probabilities: np.ndarray, *, what: str = "row") -> Axes:
    """Draw a posterior of the intrinsic dimension, (d + 1,), as bars, or several, (rows or nodes, d + 1), as a heatmap.

    Takes `Posterior.intrinsic_dimension_probabilities`, `Posterior.node_dimension_probabilities` of one tree, or the
    result of :func:`geode_jax.intrinsic_dimension`. `what` labels a heatmap's y-axis; absent nodes (NaN) are white.
    """
    probabilities = np.asarray(probabilities)
    ax.set_xlabel("intrinsic dimension")
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    if probabilities.ndim == 1:
        ax.bar(np.arange(probabilities.size), probabilities)
        ax.set(ylabel="probability", ylim=(0.0, 1.0))
        return ax
    if probabilities.ndim != 2:
        raise ValueError(f"probabilities: expected 1 or 2 axes, got shape {probabilities.shape}")
    drawn = ax.imshow(probabilities, aspect="auto", cmap="Blues", vmin=0.0, vmax=1.0, interpolation="nearest")
    ax.set_ylabel(what)
    ax.figure.colorbar(drawn, ax=ax, label="probability")
    return ax


def scale_weights(ax: Axes, posterior: Posterior) -> Axes:
    """Draw how much weight each scale has, from coarse to fine: the posterior mean of every tree, and their average."""
    check_instance(posterior, "posterior", Posterior)
    weights = posterior.scale_weights.mean(axis=(1, 2))
    scales = np.arange(weights.shape[1])
    ax.bar(scales, weights.mean(axis=0), color="tab:blue", alpha=0.4, label="mean of the trees")
    for number, tree in enumerate(weights):
        ax.plot(scales, tree, "o", color="black", markersize=3, label="a tree" if number == 0 else None)
    ax.set(xlabel="scale (0 is the root)", ylabel="weight", xticks=scales, ylim=(0.0, None))
    ax.legend(frameon=False)
    return ax


def _check_tree(posterior: Posterior, tree: int) -> int:
    check_instance(posterior, "posterior", Posterior)
    tree = check_integer(tree, "tree", 0)
    if tree >= posterior.num_trees:
        raise ValueError(f"tree: expected a number below {posterior.num_trees}, got {tree}")
    return tree


def cells(
    ax: Axes, posterior: Posterior, X: ArrayLike | None = None, *, tree: int = 0, features: Sequence[int] = (0, 1)
) -> Axes:
    """Draw the nodes of one tree in two of the features, or in three on 3-D axes, at two standard deviations.

    A node is an ellipse in two dimensions, and three orthogonal ellipses of its ellipsoid in three, at the posterior
    means of log sigma and alpha2 / sigma2. Colour shows the scale, and heavier nodes are more opaque. Nodes with less
    than 0.1% of the weight are left out. Rows of `X` are drawn as points.
    """
    tree = _check_tree(posterior, tree)
    shown = [check_integer(feature, "features", 0) for feature in features]
    wanted = 3 if ax.name == "3d" else 2
    if len(set(shown)) != wanted or len(shown) != wanted or max(shown) >= posterior.num_features:
        raise ValueError(
            f"features: expected {wanted} different numbers below {posterior.num_features}, got {features!r}"
        )
    constant = [feature for feature in shown if posterior.frame.is_left_out[feature]]
    if constant:
        raise ValueError(f"features: expected features that vary in the training rows, got {constant}, which do not")
    if X is not None:
        rows = check_data(X, allow_nan=True, num_features=posterior.num_features)
        ax.plot(*rows[:, shown].T, ".", color="black", markersize=2, alpha=0.4)
    labels = [f"feature {feature}" for feature in shown]
    shown = posterior.frame.place_of(np.array(shown)).tolist()
    posterior = posterior.of_varying
    draws = posterior.draws
    shape = noise_between(posterior, shown)
    scale_of = posterior.dictionary.tree.scale
    weight = np.exp(np.asarray(draws.log_weights[tree], np.float64)).mean(axis=(0, 1))
    # the noise variance of a scale that is empty in some draws may have no mean, but its log has
    log_noise = np.asarray(draws.log_sigma2[tree], np.float64)[..., scale_of]
    noise = np.exp(log_noise.mean(axis=(0, 1)))
    signal = noise[:, None] * np.expm1(np.asarray(draws.neg_log_u[tree], np.float64)).mean(axis=(0, 1))
    unit = posterior.scale[shown]
    angle = np.linspace(0.0, 2.0 * np.pi, 60)
    for node in np.flatnonzero(weight > 1e-3):
        centre, basis = node_in_features(posterior, tree, int(node), shown)
        covariance = (basis * signal[node]) @ basis.T + noise[node] * shape
        values, vectors = np.linalg.eigh(covariance * np.outer(unit, unit))
        centre = posterior.shift[shown] + unit * centre
        half_axes = 2.0 * np.sqrt(values) * vectors
        darkness = float(np.clip(0.15 + 0.85 * np.sqrt(weight[node] / weight.max()), 0.0, 1.0))
        for first, second in itertools.combinations(half_axes.T, 2):
            outline = centre + np.cos(angle)[:, None] * first + np.sin(angle)[:, None] * second
            ax.plot(*outline.T, color=f"C{scale_of[node] % 10}", linewidth=1.5, alpha=darkness)
    for scale in np.unique(scale_of[weight > 1e-3]):
        ax.plot(*[[]] * wanted, color=f"C{scale % 10}", label=f"scale {scale}")
    ax.set(**dict(zip(("xlabel", "ylabel", "zlabel"), labels, strict=False)))
    ax.legend(frameon=False)
    return ax


def dictionary_images(
    ax: Axes,
    posterior: Posterior,
    shape: tuple[int, int],
    *,
    tree: int = 0,
    nodes: Sequence[int],
    num_directions: int = 6,
) -> Axes:
    """Draw dictionary elements as images, one row per node: its centre, then its leading directions.

    Directions are in the data's units, each rescaled to the range of the centres; mid-grey is 0.
    """
    tree = _check_tree(posterior, tree)
    is_present = np.asarray(posterior.dictionary.tree.is_present[tree])
    nodes = [check_integer(node, "nodes", 0) for node in nodes]
    num_directions = check_integer(num_directions, "num_directions", 0)
    absent = [node for node in nodes if not (node < is_present.size and is_present[node])]
    if absent or len(set(nodes)) < max(1, len(nodes)):
        raise ValueError(f"nodes: expected different nodes of the tree, got {absent or nodes}")
    if len(shape) != 2 or np.prod([check_integer(side, "shape", 1) for side in shape]) != posterior.num_features:
        raise ValueError(f"shape: expected that of {posterior.num_features} pixels, got {shape}")
    found = [node_in_features(posterior, tree, node) for node in nodes]
    frame = posterior.frame
    centres = posterior.shift + posterior.scale * frame.in_all_features(np.stack([centre for centre, _ in found]), 1)
    low, high = float(centres.min()), float(centres.max())
    bases = frame.in_all_features(np.stack([basis[:, :num_directions] for _, basis in found]), 1)
    directions = posterior.scale[:, None] * bases
    largest = np.maximum(np.abs(directions).max(axis=1, keepdims=True), np.finfo(float).tiny)
    shown = 0.5 * (low + high) + 0.5 * (high - low) * directions / largest
    rows = {
        f"node {node}": np.concatenate([centre[None], images.T])
        for node, centre, images in zip(nodes, centres, shown, strict=True)
    }
    return image_rows(ax, rows, shape, low=low, high=high)


def interval_reliability(ax: Axes, posterior: Posterior, X: ArrayLike, hidden: ArrayLike) -> Axes:
    """Draw the coverage of central intervals of the hidden entries against their nominal probability.

    `X`: complete rows that were not in the training set, (n, D). `hidden`: mask of the entries to predict, (n, D).
    """
    check_instance(posterior, "posterior", Posterior)
    rows = check_data(X, allow_nan=False, num_features=posterior.num_features)
    mask = np.asarray(hidden)
    if mask.shape != rows.shape or mask.dtype != bool:
        raise ValueError(f"hidden: expected a boolean mask of shape {rows.shape}, got {mask.dtype} of {mask.shape}")
    if not mask.any():
        raise ValueError("hidden: expected some hidden entries, got none")
    promised = np.array([0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99])
    levels = np.concatenate([0.5 - promised / 2, 0.5 + promised / 2])
    quantiles = condition(posterior, np.where(mask, np.nan, rows)).quantile(levels.tolist())
    lower, upper = np.split(quantiles[:, mask], 2)
    kept = ((lower <= rows[mask]) & (rows[mask] <= upper)).mean(axis=1)
    ax.plot([0.0, 1.0], [0.0, 1.0], color="grey", linewidth=1, label="as promised")
    ax.plot(promised, kept, "o-", markersize=4, label="hidden entries")
    ax.set(xlabel="probability of the interval", ylabel="share inside", xlim=(0.0, 1.0), ylim=(0.0, 1.0))
    ax.legend(frameon=False)
    return ax
