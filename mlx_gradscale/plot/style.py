"""Shared plotting code: colors, fonts, power-of-two labels, and saving figures."""

import contextlib
import io
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..files.atomic import atomic_write

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Figure
else:
    Figure = Any

# The file to save a figure to, or None.
Output = str | os.PathLike[str] | None

# Colors by role. The white page also frames the plot on a dark background. In colors of
# eight digits, the last two are the opacity.
_COLORS = {
    "page": "#ffffff",
    "text": "#24292f",
    "grid": "#d0d7de",
    "line": "#0969da",
    "alarm": "#cf222e",
    "bar": "#57606a",
    "lost": "#e3631b59",
    "subnormal": "#f2c94c59",
    "normal": "#8c959f26",
}
_COLORED = {
    "page": ("axes.facecolor", "figure.facecolor", "savefig.facecolor"),
    "text": ("axes.labelcolor", "text.color", "xtick.color", "ytick.color"),
    "grid": ("axes.edgecolor", "grid.color"),
}
_SETTINGS = {
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 10,
    "font.size": 9,
    "grid.linewidth": 0.5,
    "legend.fontsize": 8,
    "legend.frameon": False,
}
# Formats the exponent x as a power of two, in text and tick labels.
POWER = "$2^{{{x:.0f}}}$"


@contextlib.contextmanager
def new_figure(
    rows: int, size: tuple[float, float], path: Output
) -> Iterator[tuple[Figure, list[Any], dict[str, str]]]:
    """Yield a figure, its axes and its colors; on exit, save to ``path`` if given."""
    try:
        import matplotlib
        import matplotlib.figure
    except ImportError as error:
        raise ImportError(
            "Plots require matplotlib. Run: pip install 'mlx_gradscale[plot]'"
        ) from error
    colored = {key: _COLORS[role] for role, keys in _COLORED.items() for key in keys}
    # Without pyplot, the figure opens no window and leaves no global state.
    with matplotlib.rc_context(_SETTINGS | colored):
        new = matplotlib.figure.Figure
        figure = new(figsize=size, dpi=130, layout="constrained")
        panels = figure.subplots(rows, squeeze=False, sharex=True)
        yield figure, list(panels.flat), _COLORS
        if path is not None:
            # Draw in memory first, so that an error leaves no file.
            data = io.BytesIO()
            figure.savefig(data, format=Path(path).suffix[1:])
            with atomic_write(path) as file:
                file.write(data.getbuffer())


def label_powers(axis: Any) -> None:
    """Label an axis of exponents with whole powers of two."""
    axis.get_major_locator().set_params(integer=True, min_n_ticks=1)
    axis.set_major_formatter(POWER)
