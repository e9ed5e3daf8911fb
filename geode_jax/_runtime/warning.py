"""Warnings that point at the line of the user's code that caused them."""

import sys
import warnings
from types import FrameType


def warn_user(message: str, category: type[Warning] = RuntimeWarning) -> None:
    """Warn with the stack level of the call that entered the package."""
    level, depth = 1, 1
    frame: FrameType | None = sys._getframe(0)
    while frame is not None:
        depth += 1
        # other packages' frames may stand between: those of decorators, say
        if frame.f_globals.get("__name__", "").split(".")[0] == "geode_jax":
            level = depth
        frame = frame.f_back
    warnings.warn(message, category, stacklevel=level)
