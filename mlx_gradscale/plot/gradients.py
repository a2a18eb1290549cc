"""Plots of a gradient histogram: bars over all values, or a map over leaves."""

import math
import os
from typing import TYPE_CHECKING, Any

from ..diagnostics import GradientHistogram, gradient_histogram
from .style import new_figure, power_of_two, save_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# How float16 represents a magnitude, by power of two: below 2**-25 it rounds to zero,
# below 2**-14 it loses bits, from 2**16 up it is inf.
_BANDS = (
    ("underflow", -math.inf, -25, "lost"),
    ("subnormal", -25, -14, "subnormal"),
    ("normal", -14, 16, "normal"),
    ("overflow", 16, math.inf, "lost"),
)
# Powers that the two outer bands span: room for their labels, and a limit for tails.
_NARROWEST, _WIDEST = 11, 40
# The number of leaf names that fit beside a 14-inch map.
_MOST_NAMES = 72


def plot_gradients(
    gradients: Any,
    path: str | os.PathLike[str] | None = None,
    *,
    scale: float | None = None,
    layers: bool = False,
    dark: bool = False,
) -> "Figure":
    """Plot gradients over float16's range, without and with loss scaling.

    Args:
        gradients (Any): A tree of unscaled gradients, or a histogram from
            :func:`~mlx_gradscale.diagnostics.gradient_histogram`.
        path (str, optional): Save the figure to this ``.png``, ``.svg`` or ``.pdf``.
        scale (float, optional): The loss scale of the second panel. Default: the
            scale of the histogram, or its best one if that is 1.
        layers (bool): Draw a map with one row per leaf. Default: ``False``.
        dark (bool): Use colours for a dark background. Default: ``False``.

    Returns:
        Figure: The matplotlib figure.

    Example:
        >>> import mlx.core as mx
        >>> from mlx_gradscale.plot import plot_gradients
        >>> gradients = {"w": mx.random.normal((50,)) * 1e-7}
        >>> figure = plot_gradients(gradients, scale=65536.0)
    """
    histogram = gradients
    if not isinstance(histogram, GradientHistogram):
        histogram = gradient_histogram(gradients)
    if not histogram.by_power():
        raise ValueError("All gradients are zero or non-finite: nothing to draw.")
    if scale is None:
        scale = histogram.scale if histogram.scale != 1 else histogram.best_scale or 1.0
    draw = _draw_map if layers else _draw_bars
    return save_figure(draw(histogram, scale, dark), path)


def _draw_bars(histogram: GradientHistogram, scale: float, dark: bool) -> "Figure":
    limits = _limits(histogram, scale)
    with new_figure(2, 1, (8.0, 4.6), dark) as (figure, panels, colors):
        for axes, each in zip(panels, (1.0, scale), strict=True):
            counts, shares = histogram.by_power(each), histogram.at(each)
            heights = [100 * count / histogram.size for count in counts.values()]
            at = [power + 0.5 for power in counts]
            axes.bar(at, heights, width=0.85, color=colors["bar"], zorder=2)
            axes.set_ylim(0, 1.45 * max(heights))
            axes.yaxis.set_major_formatter("{x:.0f}%")
            names = {b[0]: f"{b[0]}\n{_percent(getattr(shares, b[0]))}" for b in _BANDS}
            _draw_bands(axes, limits, each, colors, names, 0.95, va="top")
            rest = {"zero": shares.zero, "inf or NaN": shares.nonfinite}
            hidden = [f"{_percent(x)} {name}" for name, x in rest.items() if x]
            text = "not drawn: " + ", ".join(hidden) if hidden else ""
            axes.set_title(text, loc="right", fontweight="normal")
        figure.supylabel("share of all gradients", fontsize=9)
        panels[-1].set_xlabel("gradient magnitude")
    return figure


def _draw_map(histogram: GradientHistogram, scale: float, dark: bool) -> "Figure":
    from matplotlib.colors import LinearSegmentedColormap

    low, high = limits = _limits(histogram, scale)
    leaves = {path: leaf for path, leaf in histogram.leaves.items() if leaf.by_power()}
    size = (9.0, min(max(2.6, 1.0 + 0.16 * len(leaves)), 14.0))
    with new_figure(1, 2, size, dark) as (figure, panels, colors):
        ends = [colors["few"], colors["many"]]
        ramp = LinearSegmentedColormap.from_list("shares", ends)
        look: Any = {"cmap": ramp, "vmin": 0, "vmax": 30, "aspect": "auto", "zorder": 2}
        for axes, each in zip(panels, (1.0, scale), strict=True):
            table = [[math.nan] * (high - low) for _ in leaves]
            for row, leaf in zip(table, leaves.values(), strict=True):
                for power, count in leaf.by_power(each).items():
                    if low <= power < high:
                        row[power - low] = 100 * count / leaf.size
            image = axes.imshow(table, extent=(low, high, len(leaves), 0), **look)
            names = {band[0]: band[0] for band in _BANDS}
            _draw_bands(axes, limits, each, colors, names, 1.01, va="bottom", size=6)
            axes.set_title(axes.get_title(loc="left"), pad=14)
            axes.grid(False)
        shown = range(0, len(leaves), math.ceil(len(leaves) / _MOST_NAMES))
        labels = [list(leaves)[i] for i in shown]
        panels[0].set_yticks([i + 0.5 for i in shown], labels, fontsize=7)
        bar = figure.colorbar(image, ax=panels, aspect=25, shrink=0.6, extend="max")
        bar.ax.yaxis.set_major_formatter("{x:.0f}%")
        bar.set_label("share of the leaf's gradients")
        bar.outline.set_visible(False)
        figure.supxlabel("gradient magnitude", fontsize=9)
    return figure


def _limits(histogram: GradientHistogram, scale: float) -> tuple[int, int]:
    """Return the powers to show: all of float16, and all that contain a gradient."""
    powers = [*histogram.by_power(), *histogram.by_power(scale)]
    low = max(min(-25 - _NARROWEST, *powers), -25 - _WIDEST)
    high = min(max(16 + _NARROWEST, max(powers) + 1), 16 + _WIDEST)
    return low, high


def _draw_bands(
    axes: Any,
    limits: tuple[int, int],
    scale: float,
    colors: dict[str, str],
    names: dict[str, str],
    height: float,
    **text: Any,
) -> None:
    """Draw float16's ranges behind the values, with labels at a given height."""
    for name, first, last, color in _BANDS:
        start, end = max(first, limits[0]), min(last, limits[1])
        axes.axvspan(start, end, color=colors[color], lw=0, zorder=0)
        place = {"transform": axes.get_xaxis_transform(), "ha": "center"}
        axes.text((start + end) / 2, height, names[name], **place, **text)
    axes.set_xlim(*limits)
    axes.xaxis.set_ticks([p for p in range(*limits) if p % 8 == 0])
    axes.xaxis.set_major_formatter(power_of_two)
    axes.grid(False, axis="x")
    scaled = f"with loss scale {power_of_two(math.log2(scale))}"
    axes.set_title("without loss scaling" if scale == 1 else scaled)


def _percent(share: float) -> str:
    """Format a share so that only an exact zero reads as zero."""
    if share == 0:
        return "0"
    return "<0.01%" if share < 1e-4 else f"{share:.2%}"
