"""Colours and canvas: pictures that sit on a light or a dark page."""

import contextlib
import io
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..files.atomic import atomic_write

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# GitHub's page and text colours, so that a picture in a README sits on the page. What
# is marked differs in lightness too: orange, yellow, grey, never red beside green.
_LIGHT: dict[str, Any] = {
    "page": "#ffffff",
    "text": "#24292f",
    "faint": "#d0d7de",
    "line": "#0969da",
    "second": "#8250df",
    "alarm": "#cf222e",
    "bar": "#57606a",
    "lost": "#e3631b59",
    "subnormal": "#f2c94c59",
    "normal": "#8c959f26",
    "map": ("#b6d7ff", "#0a3069"),
}
_DARK: dict[str, Any] = {
    "page": "#0d1117",
    "text": "#e6edf3",
    "faint": "#30363d",
    "line": "#58a6ff",
    "second": "#bc8cff",
    "alarm": "#ff7b72",
    "bar": "#c9d1d9",
    "lost": "#e3631b73",
    "subnormal": "#c9a2275c",
    "normal": "#8b949e33",
    "map": ("#1f4b7a", "#ddf4ff"),
}


@contextlib.contextmanager
def canvas(
    rows: int,
    columns: int,
    dark: bool,
    size: tuple[float, float],
    *,
    dpi: int = 130,
    share: dict[str, Any] | None = None,
) -> Iterator[tuple["Figure", Any, dict[str, Any]]]:
    """Yield a figure, its array of axes, and the colours of its theme.

    Args:
        rows (int): Of axes.
        columns (int): Of axes.
        dark (bool): For a dark page.
        size (tuple): Inches.
        dpi (int): Pixels per inch. Default: ``130``.
        share (dict, optional): ``sharex`` and ``sharey``, as ``subplots`` takes them.
            Default: the x axis in one column, else the y axis.
    """
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "Pictures need matplotlib: pip install 'mlx_gradscale[plot]'."
        ) from error
    colors = _DARK if dark else _LIGHT
    settings = {
        "axes.edgecolor": colors["faint"],
        "axes.facecolor": colors["page"],
        "axes.grid": True,
        "axes.labelcolor": colors["text"],
        "axes.spines.right": False,
        "axes.spines.top": False,
        "axes.titlecolor": colors["text"],
        "axes.titlesize": 9,
        "figure.facecolor": colors["page"],
        "font.size": 9,
        "grid.color": colors["faint"],
        "grid.linewidth": 0.5,
        "legend.labelcolor": colors["text"],
        "savefig.facecolor": colors["page"],
        "text.color": colors["text"],
        "xtick.color": colors["text"],
        "ytick.color": colors["text"],
    }
    # A figure without pyplot: no window, no backend, nothing global left behind.
    with matplotlib.rc_context(settings):
        figure = Figure(figsize=size, dpi=dpi, layout="constrained")
        share = share or {"sharex": columns == 1, "sharey": columns > 1}
        yield figure, figure.subplots(rows, columns, squeeze=False, **share), colors


def ramp(colors: dict[str, Any]) -> Any:
    """Return the colour map of a theme; its ends stand out from the page."""
    from matplotlib.colors import LinearSegmentedColormap

    return LinearSegmentedColormap.from_list("ramp", colors["map"])


def saved(figure: "Figure", path: str | os.PathLike[str] | None) -> "Figure":
    """Write the figure to a file, atomically, if there is a path."""
    if path is not None:
        path = Path(path)
        known = figure.canvas.get_supported_filetypes()
        if path.suffix[1:] not in known:
            raise ValueError(
                f"Cannot draw to {path.name!r}: use one of .{', .'.join(known)}."
            )
        # Not to the file itself: matplotlib's errors would hide a full disk's.
        data = io.BytesIO()
        figure.savefig(data, format=path.suffix[1:])
        with atomic_write(path) as file:
            file.write(data.getbuffer())
    return figure
