"""Warnings that point to the user's own line."""

import sys
import warnings
from types import FrameType

# Packages whose frames may come between the user's line and a warning.
_BETWEEN = ("mlx_gradscale", "mlx", "functools", "contextlib")


def warn_user(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn, pointing to the first line outside this package and MLX."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and _top_module(frame) in _BETWEEN:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level + 1)


def _top_module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]
