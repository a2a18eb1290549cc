"""The pictures of a gradient histogram: bars for all, a heat map per leaf."""

import math
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ..diagnostics import GradientHistogram, gradient_histogram
from ..diagnostics.histogram import LARGEST, NORMAL, ROUNDS_UP
from ..files.text import percent
from .theme import canvas, ramp, saved

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Name, as in a histogram, start and end in powers of two, colour. None is the
# picture's edge.
_BANDS = (
    ("underflow", None, ROUNDS_UP, "lost"),
    ("subnormal", ROUNDS_UP, NORMAL, "subnormal"),
    ("normal", NORMAL, LARGEST + 1, "normal"),
    ("overflow", LARGEST + 1, None, "lost"),
)
_X_LABEL = "magnitude of the gradient, and what float16 makes of it"
# Room beside float16's range for the labels, and no more than this for tails.
_MARGIN, _WIDEST = 8, 40
_RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def plot_gradients(
    gradients: Any,
    path: str | os.PathLike[str] | None = None,
    *,
    scale: float | None = None,
    layers: bool = False,
    dark: bool = False,
) -> "Figure":
    """Draw where gradients lie in float16, before and after scaling.

    Args:
        gradients (Any): The true gradients, a tree, or their histogram from
            :func:`gradient_histogram`.
        path (str, optional): Write the picture to this file, ``.png``, ``.svg`` or
            ``.pdf``.
        scale (float, optional): The loss scale of the second half. Default: that
            of the histogram, or the best one if that is 1.
        layers (bool): A heat map with a row per leaf. Default: ``False``.
        dark (bool): For a dark page. Default: ``False``.

    Returns:
        Figure: A matplotlib figure, to change or to save.

    Example:
        >>> import mlx.core as mx
        >>> from mlx_gradscale.plot import plot_gradients
        >>> gradients = {"w": mx.random.normal((50,)) * 1e-7}
        >>> figure = plot_gradients(gradients, scale=65536.0)
    """
    is_histogram = isinstance(gradients, GradientHistogram)
    histogram = gradients if is_histogram else gradient_histogram(gradients)
    if not histogram.by_power():
        raise ValueError("There is no gradient here but zeros: nothing to draw.")
    if scale is None:
        scale = histogram.scale if histogram.scale != 1 else histogram.best_scale or 1.0
    draw = _draw_layers if layers else _draw_all
    return saved(draw(histogram, scale, dark), path)


def _draw_all(histogram: GradientHistogram, scale: float, dark: bool) -> "Figure":
    from matplotlib.ticker import PercentFormatter

    with canvas(2, 1, dark, (8.0, 4.6)) as (figure, all_axes, colors):
        edges = _edges(histogram, scale)
        for axes, s in zip(all_axes.flat, (1.0, scale), strict=True):
            counts = histogram.by_power(s)
            shares = [n / histogram.size for n in counts.values()]
            middles = [p + 0.5 for p in counts]
            axes.bar(middles, shares, width=0.85, color=colors["bar"], zorder=2)
            axes.set_ylim(0, 1.45 * max(shares))
            axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
            axes.grid(False, axis="x")
            _background(axes, edges, s, colors)
            _write_shares(axes, histogram, s)
        figure.supylabel("share of all gradients", fontsize=9)
        all_axes.flat[-1].set_xlabel(_X_LABEL)
    return figure


def _draw_layers(histogram: GradientHistogram, scale: float, dark: bool) -> "Figure":
    leaves = {k: h for k, h in histogram.leaves.items() if h.by_power()}
    height = min(max(2.6, 1.0 + 0.16 * len(leaves)), 14.0)
    with canvas(1, 2, dark, (8.0, height)) as (figure, all_axes, colors):
        low, high = edges = _edges(histogram, scale)
        for axes, s in zip(all_axes.flat, (1.0, scale), strict=True):
            table = [[math.nan] * (high - low) for _ in leaves]
            for row, leaf in zip(table, leaves.values(), strict=True):
                for p, count in leaf.by_power(s).items():
                    if low <= p < high:
                        row[p - low] = count / leaf.size
            image = axes.imshow(
                table,
                aspect="auto",
                extent=(low, high, len(leaves), 0),
                cmap=ramp(colors),
                vmin=0.0,
                vmax=0.3,
                interpolation="nearest",
                zorder=2,
            )
            axes.grid(False)
            _background(axes, edges, s, colors)
            _write_names(axes)
        # A picture of at most 14 inches has room for some 72 names.
        every = math.ceil(len(leaves) / 72)
        first = all_axes.flat[0]
        first.set_yticks([i + 0.5 for i in range(0, len(leaves), every)])
        first.set_yticklabels(list(leaves)[::every], fontsize=7)
        bar = figure.colorbar(
            image, ax=list(all_axes.flat), pad=0.02, aspect=25, shrink=0.6, extend="max"
        )
        bar.ax.set_yticks([0, 0.1, 0.2, 0.3], ["0", "10%", "20%", "30%"])
        bar.set_label("share of the leaf's gradients")
        bar.outline.set_visible(False)
        figure.supxlabel(_X_LABEL, fontsize=9)
    return figure


def _edges(histogram: GradientHistogram, scale: float) -> tuple[int, int]:
    """Return the powers to show: all of float16, and all that hold a gradient."""
    powers = [*histogram.by_power(), *histogram.by_power(scale)]
    low = min(ROUNDS_UP - _MARGIN, *powers)
    high = max(LARGEST + 1 + _MARGIN, max(powers) + 1)
    return max(low, ROUNDS_UP - _WIDEST), min(high, LARGEST + _WIDEST)


def _background(
    axes: "Axes", edges: tuple[int, int], scale: float, colors: dict[str, str]
) -> None:
    from matplotlib.ticker import FuncFormatter, MultipleLocator

    axes.set_xlim(*edges)
    for _, start, end, color in _bands(axes):
        axes.axvspan(start, end, color=colors[color], lw=0, zorder=0)
    axes.xaxis.set_major_locator(MultipleLocator(8))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda p, _: f"$2^{{{p:.0f}}}$"))
    name = "without loss scaling"
    if scale != 1:
        # Not as a formula, which would not be bold.
        name = f"with loss scale 2{str(round(math.log2(scale))).translate(_RAISED)}"
    axes.set_title(name, loc="left", fontweight="bold")


def _bands(axes: "Axes") -> Iterator[tuple[str, float, float, str]]:
    low, high = axes.get_xlim()
    for name, start, end, color in _BANDS:
        left, right = low if start is None else start, high if end is None else end
        yield name, left, right, color


def _write_names(axes: "Axes") -> None:
    low, high = axes.get_xlim()
    for i, (name, start, end, _) in enumerate(_bands(axes)):
        # At the edges, and by turns a line higher, or they would run into each other.
        at, side = (start + end) / 2, "center"
        if start == low or end == high:
            at, side = (low, "left") if start == low else (high, "right")
        axes.annotate(
            name,
            (at, 1),
            xycoords=axes.get_xaxis_transform(),
            xytext=(0, 2 + 8 * (i % 2)),
            textcoords="offset points",
            fontsize=7,
            ha=side,
            va="bottom",
            annotation_clip=False,
        )
    axes.set_title(axes.get_title("left"), loc="left", fontweight="bold", pad=22)


def _write_shares(axes: "Axes", histogram: GradientHistogram, scale: float) -> None:
    shares = histogram.at(scale)
    for name, start, end, _ in _bands(axes):
        axes.text(
            (start + end) / 2,
            0.95,
            f"{name}\n{percent(getattr(shares, name))}",
            transform=axes.get_xaxis_transform(),
            ha="center",
            va="top",
            fontsize=9,
        )
    if shares.zero or shares.nonfinite:
        rest = [f"{percent(shares.zero)} zero"] if shares.zero else []
        rest += [f"{percent(shares.nonfinite)} inf or NaN"] if shares.nonfinite else []
        axes.set_title("not drawn: " + ", ".join(rest), loc="right")
