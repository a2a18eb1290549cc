"""The picture of a search for float32 layers: how near each layer is to 65504."""

import math
import os
from typing import TYPE_CHECKING, Any

from ..files.text import power
from ..float16.report import LARGEST, Float32Search, Row
from .theme import canvas, saved

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Float16's smallest number, and room above its largest.
_LOWEST, _ROOM = 2.0**-24, 2.0**3
_MOST_NAMES = 40


def plot_headroom(
    search: Float32Search,
    path: str | os.PathLike[str] | None = None,
    *,
    dark: bool = False,
    title: str | None = None,
) -> "Figure":
    """Draw the largest value of each layer against 65504, before and after.

    Args:
        search (Float32Search): What ``find_float32_layers`` returned.
        path (str, optional): Write the picture to this file, ``.png``, ``.svg`` or
            ``.pdf``.
        dark (bool): For a dark page. Default: ``False``.
        title (str, optional): Above the picture. Default: what is drawn.

    Returns:
        Figure: A matplotlib figure, to change or to save.

    Example:
        >>> import mlx.core as mx, mlx.nn as nn
        >>> from mlx_gradscale import find_float32_layers
        >>> from mlx_gradscale.plot import plot_headroom
        >>> model = nn.Linear(2, 2)
        >>> def loss_fn(x):
        ...     return model(x).sum()
        >>> found = find_float32_layers(
        ...     model, loss_fn, [mx.ones((1, 2))], compute_dtype=mx.float16
        ... )
        >>> len(plot_headroom(found).axes)
        1
    """
    rows = [row for row in search.rows if row.layer] or list(search.rows)
    if not rows:
        raise ValueError(f"There is nothing to draw. {search.problem}".strip())
    panels = 2 if search.where else 1
    names = _names(rows)
    longest = max(len(name) for name in names.values())
    size = (9.0, 0.9 + 2.4 * panels + 0.055 * longest)
    with canvas(panels, 1, dark, size) as (figure, all_axes, colors):
        all_axes = list(all_axes.flat)
        faults = sum(row.forward > LARGEST or bool(row.why) for row in rows)
        before = f"all in float16: {faults} of {len(rows)} layers overflow"
        _draw(all_axes[0], rows, False, colors, search.scale)
        all_axes[0].set_title(title or before, loc="left", fontweight="bold")
        if search.where:
            _draw(all_axes[1], rows, True, colors, search.scale)
            kept = f"{search.float16_parameters:.1%} of the parameters stay float16"
            text = f"with float32 layers: {kept}"
            all_axes[1].set_title(text, loc="left", fontweight="bold")
        last = all_axes[-1]
        last.set_xticks(list(names), list(names.values()), rotation=90, fontsize=7)
        all_axes[0].legend(loc="lower left", frameon=False, ncols=3, fontsize=8)
        figure.supylabel("largest magnitude", fontsize=9)
    return saved(figure, path)


def _draw(
    axes: "Axes", rows: list[Row], cured: bool, colors: dict[str, Any], scale: float
) -> None:
    at = range(len(rows))
    axes.set_yscale("log", base=2)
    values = [x for row in rows for x in (row.forward, row.backward) if x > 0]
    top = max(LARGEST * _ROOM, 4 * max(values, default=1.0))
    low = max(min(values, default=1.0) / 4, _LOWEST)
    axes.set_ylim(low, top)
    axes.set_xlim(-0.8, len(rows) - 0.2)
    axes.axhspan(LARGEST, top, color=colors["lost"], lw=0, zorder=0)
    axes.axhline(LARGEST, color=colors["alarm"], lw=1.0, zorder=1)
    axes.annotate(
        "65504",
        (1.0, LARGEST),
        xycoords=("axes fraction", "data"),
        xytext=(3, 0),
        textcoords="offset points",
        va="center",
        fontsize=8,
        color=colors["alarm"],
        annotation_clip=False,
    )
    if cured:
        for first, last in _stretches([row.is_float32 for row in rows]):
            axes.axvspan(first - 0.5, last + 0.5, color=colors["normal"], lw=0)
    series = (
        ("forward", "forward", "line", "o"),
        ("backward", f"backward, loss scale {power(scale)}", "second", "^"),
    )
    for name, label, color, marker in series:
        found = [max(getattr(row, name), 0.0) or math.nan for row in rows]
        half = [
            y if not (cured and r.is_float32) else math.nan
            for y, r in _zip(found, rows)
        ]
        axes.plot(at, half, marker, ms=3.5, color=colors[color], label=label, zorder=3)
        if cured:
            other = [y if r.is_float32 else math.nan for y, r in _zip(found, rows)]
            axes.plot(
                at, other, marker, ms=3.5, color=colors[color], mfc="none", zorder=3
            )
        else:
            # What overflows inside a layer does not show in its largest value.
            inside = [bool(row.why) and name == "forward" for row in rows]
            lost = [
                y if y > LARGEST or fault else math.nan
                for y, fault in zip(found, inside, strict=True)
            ]
            axes.plot(at, lost, marker, ms=5, color=colors["alarm"], zorder=4)
    if cured:
        axes.plot([], [], "o", color=colors["text"], mfc="none", label="in float32")
        axes.legend(loc="lower left", frameon=False, ncols=3, fontsize=8)
    axes.minorticks_off()
    axes.grid(False, axis="x")


def _zip(values: list[float], rows: list[Row]) -> Any:
    return zip(values, rows, strict=True)


def _stretches(flags: list[bool]) -> list[tuple[int, int]]:
    """Return first and last index of every run of True."""
    starts = [i for i, x in enumerate(flags) if x and not (i and flags[i - 1])]
    ends = [i for i, x in enumerate(flags) if x and not (flags[i + 1 :] or [False])[0]]
    return list(zip(starts, ends, strict=True))


def _names(rows: list[Row]) -> dict[int, str]:
    """Return what to write below: every name, or those of the outer layers."""
    every = math.ceil(len(rows) / _MOST_NAMES)
    names: dict[int, str] = {}
    for depth in sorted({row.layer.count(".") for row in rows}):
        if len(names) > _MOST_NAMES / 3:
            break
        for i, row in enumerate(rows):
            is_free = all(abs(i - other) >= every for other in names)
            if row.layer.count(".") == depth and is_free:
                names[i] = row.layer
    return names
