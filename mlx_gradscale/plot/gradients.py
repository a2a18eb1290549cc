"""Plot a histogram of gradients against the range of float16."""

import math
from typing import Any

from ..diagnostics import GradientHistogram, gradient_histogram
from ..diagnostics.histogram import LARGEST, NORMAL, ROUNDS_UP
from ..diagnostics.reading import scale_of
from ..files.text import percent
from .style import POWER, Figure, Output, new_figure

# The exponents to show. The outer bands are wide enough for their labels.
_LOW, _HIGH = ROUNDS_UP - 31, LARGEST + 13
# The name, the exponents and the color of each range of float16.
_BANDS = (
    ("underflow", _LOW, ROUNDS_UP, "lost"),
    ("subnormal", ROUNDS_UP, NORMAL, "subnormal"),
    ("normal", NORMAL, LARGEST + 1, "normal"),
    ("overflow", LARGEST + 1, _HIGH, "lost"),
)


def plot_gradients(
    gradients: Any,
    path: Output = None,
    *,
    scale: Any = None,
) -> Figure:
    """Plot gradients against the range of float16, without and with loss scaling.

    Args:
        gradients (Any): A tree of unscaled gradients, or a histogram from
            :func:`~mlx_gradscale.diagnostics.gradient_histogram`. For one parameter,
            pass ``histogram.leaves[path]``.
        path (str, optional): The ``.png``, ``.svg`` or ``.pdf`` file to write.
        scale (float, GradScaler or LossScaleOptimizer): The loss scale of the second
            panel. Default: the ``best_scale`` of the histogram.

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
        raise ValueError("Nothing to plot: no gradient has a finite, nonzero value.")
    scale = scale_of(histogram.best_scale if scale is None else scale)
    with new_figure(2, (8.0, 4.9), path) as (figure, panels, colors):
        for axes, each in zip(panels, (1.0, scale), strict=True):
            counts = histogram.by_power(each)
            heights = [100 * count / histogram.size for count in counts.values()]
            look: Any = {"color": colors["bar"], "width": 0.85, "zorder": 2}
            axes.bar([p + 0.5 for p in counts], heights, **look)
            axes.set_xlim(_LOW, _HIGH)
            axes.xaxis.set_ticks(range(_LOW, _HIGH + 1, 8))
            axes.xaxis.set_major_formatter(POWER)
            axes.yaxis.set_major_formatter("{x:.0f}%")
            axes.grid(False, axis="x")
            shares = histogram.at(each)
            for name, start, end, color in _BANDS:
                axes.axvspan(start, end, color=colors[color], lw=0, zorder=0)
                text = f"{name}\n{percent(getattr(shares, name))}"
                place: Any = {"transform": axes.get_xaxis_transform(), "ha": "center"}
                axes.text((start + end) / 2, 1.02, text, size=8, **place)
            title = f"with loss scale {POWER.format(x=math.log2(each))}"
            axes.set_title("without loss scaling" if each == 1 else title, pad=28)
            rest = {"zero": shares.zero, "inf or NaN": shares.nonfinite}
            hidden = ", ".join(f"{percent(x)} {name}" for name, x in rest.items() if x)
            title = f"not drawn: {hidden}" if hidden else ""
            axes.set_title(title, loc="right", fontsize=8, pad=28)
        figure.supylabel("share of all gradients", fontsize=9)
        label = "gradient magnitude (float16 keeps fewer bits of subnormal numbers)"
        panels[-1].set_xlabel(label)
    return figure
