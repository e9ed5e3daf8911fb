"""Warnings that point at the line of the user's code that caused them."""

import sys
import warnings


def warn_user(message: str, category: type[Warning] = RuntimeWarning) -> None:
    """Warn with the stack level of the call that entered the package."""
    level, frame = 1, sys._getframe(0)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] == "geode_jax":
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)
