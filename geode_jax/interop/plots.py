"""Pictures, with matplotlib (``pip install "geode-jax[plots]"``)."""

from collections.abc import Mapping

import numpy as np
from matplotlib.axes import Axes


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
