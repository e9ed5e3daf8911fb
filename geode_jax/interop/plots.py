"""Pictures, with matplotlib (``pip install "geode-jax[plots]"``)."""

from collections.abc import Mapping

import numpy as np
from matplotlib.axes import Axes

from geode_jax.posterior import Posterior


def image_rows(ax: Axes, rows: Mapping[str, np.ndarray], shape: tuple[int, int], *, low: float, high: float) -> Axes:
    """Draw labelled rows of images on one axes; each array is (images, pixels), NaN is drawn as a missing pixel.

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
    """Draw the probability that direction m is in use, for m = 1..d (the paper's figure 3)."""
    chances = posterior.inclusion_probabilities
    ax.plot(np.arange(1, chances.size + 1), chances, "o-", markersize=4)
    ax.set(xlabel="direction", ylabel="inclusion probability", ylim=(-0.03, 1.03))
    return ax


def intrinsic_dimension(ax: Axes, probabilities: np.ndarray, *, what: str = "row") -> Axes:
    """Draw a posterior of the intrinsic dimension, (d + 1,), as bars, or several, (rows or nodes, d + 1), as a map.

    Takes `Posterior.intrinsic_dimension_probabilities`, `Posterior.node_dimension_probabilities` of one tree, or
    :func:`geode_jax.intrinsic_dimension` of rows. `what` names the rows of a map; absent nodes (NaN) stay white.
    """
    probabilities = np.asarray(probabilities)
    ax.set_xlabel("intrinsic dimension")
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
