"""Plot runs, gradients and layers. Requires matplotlib, which ``[plot]`` installs."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from .commands import run_command
from .diagnostics import ScaleHistory, gradient_histogram
from .diagnostics.histogram import LARGEST, NORMAL, ROUNDS_UP, GradientHistogram
from .diagnostics.reading import scale_of
from .diagnostics.rounding import LostUpdates
from .files.disk import atomic_write
from .files.text import percent, plural
from .float32 import Float32Search, Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["plot_gradients", "plot_headroom", "plot_history", "plot_lost_updates"]

# The file to save a figure to, or None.
Output = str | os.PathLike[str] | None

_LINE, _ALARM, _BAR = "#0969da", "#cf222e", "#57606a"
# Backgrounds. The last two of eight digits are the opacity.
_LOST, _SUBNORMAL, _NORMAL = "#e3631b59", "#f2c94c59", "#8c959f26"
# Formats the exponent x as a power of two, in text and tick labels.
_POWER = "$2^{{{x:.0f}}}$"
_PANELS = {"loss": "loss", "scale": "loss scale", "grad_norm": "gradient norm"}
_MOST_LAYERS = 40
# The exponents of gradients to show. The outer ranges are wide enough for their labels.
_LOW, _HIGH = ROUNDS_UP - 31, LARGEST + 13
# The name, the exponents and the background of each range of float16.
_RANGES = (
    ("underflow", _LOW, ROUNDS_UP, _LOST),
    ("subnormal", ROUNDS_UP, NORMAL, _SUBNORMAL),
    ("normal", NORMAL, LARGEST + 1, _NORMAL),
    ("overflow", LARGEST + 1, _HIGH, _LOST),
)


def plot_history(
    history: ScaleHistory | str | os.PathLike[str], path: Output = None
) -> Figure:
    """Plot the loss, loss scale and gradient norm of a run, and mark skipped steps.

    A line has a gap where a value is inf or NaN.

    Args:
        history (ScaleHistory or str): The history, or its ``.csv`` file.
        path (str, optional): The ``.png``, ``.svg`` or ``.pdf`` file to write.

    Returns:
        Figure: The matplotlib figure.

    Example:
        >>> from mlx_gradscale import GradScaler
        >>> from mlx_gradscale.diagnostics import ScaleHistory
        >>> from mlx_gradscale.plot import plot_history
        >>> history = ScaleHistory()
        >>> history.record(GradScaler(), loss=0.5)
        >>> len(plot_history(history).axes)
        2
    """
    if not isinstance(history, ScaleHistory):
        history = ScaleHistory.load(history)
    records, skipped = history.records, history.skipped
    if not records:
        raise ValueError("The history is empty. Record some steps first.")
    recorded = {
        name: [(r.step, y) for r in records if (y := getattr(r, name)) is not None]
        for name in _PANELS
    }
    recorded = {name: points for name, points in recorded.items() if points}
    size = 8.0, 0.7 + 1.55 * len(recorded)
    figure, panels = _new_figure(len(recorded), size)
    for axes, (name, points) in zip(panels, recorded.items(), strict=True):
        steps, values = np.array(points).T
        finite = values[np.isfinite(values)]
        # Without a marker, a value between two gaps would be invisible.
        look: Any = {"color": _LINE, "lw": 1, "marker": ".", "ms": 4, "mew": 0}
        if name == "scale":
            # Exponents on a linear axis: for a scale that moves between two powers,
            # matplotlib's logarithmic axis shows only one label.
            values = np.log2(values)
            _label_powers(axes.yaxis)
            look["drawstyle"] = "steps-post"
        elif finite.size and 0 < finite.min() < finite.max() / 50:
            axes.set_yscale("log")
        axes.plot(steps, values, **look)
        axes.set_ylabel(_PANELS[name])
        if skipped:
            top = {"transform": axes.get_xaxis_transform(), "clip_on": False}
            ones = [1.0] * len(skipped)
            axes.plot(skipped, ones, "v", color=_ALARM, label="skipped step", **top)
    panels[0].set_title(f"{plural(len(records), 'step')}, {len(skipped)} skipped")
    panels[-1].set_xlabel("step")
    return _save(figure, path)


def plot_gradients(gradients: Any, path: Output = None, *, scale: Any = None) -> Figure:
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
    figure, panels = _new_figure(2, (8.0, 4.9))
    for axes, each in zip(panels, (1.0, scale), strict=True):
        counts, shares = histogram.by_power(each), histogram.at(each)
        heights = [100 * count / histogram.size for count in counts.values()]
        axes.bar([p + 0.5 for p in counts], heights, color=_BAR, width=0.85)
        axes.set_xlim(_LOW, _HIGH)
        axes.xaxis.set_ticks(range(_LOW, _HIGH + 1, 8))
        axes.xaxis.set_major_formatter(_POWER)
        axes.yaxis.set_major_formatter("{x:.0f}%")
        axes.grid(False, axis="x")
        for name, start, end, color in _RANGES:
            axes.axvspan(start, end, color=color, lw=0, zorder=0)
            look: Any = {"transform": axes.get_xaxis_transform(), "ha": "center"}
            text = f"{name}\n{percent(getattr(shares, name))}"
            axes.text((start + end) / 2, 1.02, text, size=8, **look)
        title = f"with loss scale {_POWER.format(x=math.log2(each))}"
        axes.set_title("without loss scaling" if each == 1 else title, pad=28)
        rest = {"zero": shares.zero, "inf or NaN": shares.nonfinite}
        if hidden := [f"{percent(x)} {name}" for name, x in rest.items() if x]:
            title = f"not drawn: {', '.join(hidden)}"
            axes.set_title(title, loc="right", fontsize=8, pad=28)
    figure.supylabel("share of all gradients", fontsize=9)
    label = "gradient magnitude (float16 keeps fewer bits of subnormal numbers)"
    panels[-1].set_xlabel(label)
    return _save(figure, path)


def plot_headroom(search: Float32Search, path: Output = None) -> Figure:
    """Plot how close each layer's values come to the dtype's maximum (float16: 65504).

    A layer that the search makes float32 although its values fit computes something
    larger inside, such as the mean of squares in a norm. Of more than 40 layers, the 40
    that come closest are drawn.

    Args:
        search (Float32Search): The result of ``find_float32_layers``.
        path (str, optional): The ``.png``, ``.svg`` or ``.pdf`` file to write.

    Returns:
        Figure: The matplotlib figure.

    Example:
        >>> import mlx.core as mx, mlx.nn as nn
        >>> from mlx_gradscale import find_float32_layers
        >>> from mlx_gradscale.plot import plot_headroom
        >>> model, x = nn.Linear(2, 2), mx.ones((1, 2), mx.float16)
        >>> model.set_dtype(mx.float16)
        >>> found = find_float32_layers(model, lambda x: model(x).sum(), [x])
        >>> len(plot_headroom(found).axes)
        1
    """
    rows = [row for row in search.rows if row.layer] or list(search.rows)
    if not rows:
        raise ValueError(f"There is nothing to plot. {search.problem}".strip())
    dtype = "float16" if rows[0].maximum == Row.maximum else "bfloat16"
    limit, is_inside = math.log2(rows[0].maximum), set(search.where)
    lost = sum(row.headroom < 0 or row.layer in is_inside for row in rows)
    title = f"{lost} of {len(rows)} layers overflow in {dtype}"
    if search.where:
        title += f"; {search.float16_parameters:.1%} of parameters stay in {dtype}"
    badness = {x.layer: math.inf if x.layer in is_inside else -x.headroom for x in rows}
    half, full = (f"computes in {dtype}", _LINE), ("computes in float32", _ALARM)
    series: dict[tuple[str, str], dict[str, float]] = {half: {}, full: {}}
    for row in rows:
        series[full if row.is_float32 else half][row.layer] = limit - row.headroom
    figure, axes = _plot_layers(badness, series, title)
    axes.axvline(limit, color=_ALARM, lw=1, label=f"{rows[0].maximum:.5g}")
    axes.set_xlabel("largest magnitude")
    _label_powers(axes.xaxis)
    return _save(figure, path)


def plot_lost_updates(report: LostUpdates, path: Output = None) -> Figure:
    """Plot the share of an update that each layer loses, and of weights that are stuck.

    Of more than 40 layers, the 40 that lose most are drawn.

    Args:
        report (LostUpdates): The result of
            :func:`~mlx_gradscale.diagnostics.lost_updates`.
        path (str, optional): The ``.png``, ``.svg`` or ``.pdf`` file to write.

    Returns:
        Figure: The matplotlib figure.

    Example:
        >>> import mlx.core as mx, mlx.nn as nn, mlx.optimizers as optim
        >>> from mlx_gradscale.diagnostics import lost_updates
        >>> from mlx_gradscale.plot import plot_lost_updates
        >>> model, x = nn.Linear(2, 2), mx.ones((1, 2), mx.bfloat16)
        >>> model.set_dtype(mx.bfloat16)
        >>> report = lost_updates(optim.SGD(1e-3), model, lambda x: model(x).sum(), x)
        >>> len(plot_lost_updates(report).axes)
        1
    """
    badness = {k: x.lost for k, x in report.layers.items() if not math.isnan(x.lost)}
    if not badness:
        raise ValueError(f"There is nothing to plot. {report.verdict}".strip())
    stuck = {name: report.layers[name].stuck for name in badness}
    series = {
        ("weights that do not move", _BAR): stuck,
        ("lost update", _LINE): badness,
    }
    figure, axes = _plot_layers(badness, series, report.verdict)
    axes.xaxis.set_major_formatter(lambda x, _: f"{x:.0%}")
    return _save(figure, path)


def _new_figure(rows: int, size: tuple[float, float]) -> tuple[Figure, list[Any]]:
    """Return a figure and its axes, one below the other."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "Plots require matplotlib. Run: pip install 'mlx_gradscale[plot]'"
        ) from error
    # Without pyplot, the figure opens no window and leaves no global state.
    figure = Figure(figsize=size, dpi=130, layout="constrained")
    panels = list(figure.subplots(rows, squeeze=False, sharex=True).flat)
    for axes in panels:
        axes.grid(alpha=0.4)
    return figure, panels


def _plot_layers(
    badness: dict[str, float],
    series: dict[tuple[str, str], dict[str, float]],
    title: str,
) -> tuple[Figure, Any]:
    """Draw a row for each of the worst layers, and return the figure and its axes.

    ``series`` has, by label and color, a value for each layer.
    """
    worst = sorted(badness, key=lambda name: -badness[name])[:_MOST_LAYERS]
    shown = [name for name in badness if name in worst]
    figure, (axes,) = _new_figure(1, (8.0, 1.2 + 0.14 * len(shown)))
    for (label, color), values in series.items():
        rows = [i for i, name in enumerate(shown) if name in values]
        found = [values[shown[i]] for i in rows]
        axes.plot(found, rows, "o", color=color, ms=4, label=label)
    axes.set_title(title, pad=20)
    axes.set_yticks(range(len(shown)), shown, fontsize=7)
    axes.set_ylim(len(shown) - 0.5, -0.5)
    return figure, axes


def _save(figure: Figure, path: Output) -> Figure:
    """Add a legend, write the figure to a file if there is a path, and return it."""
    axes = figure.axes[0]
    if axes.get_legend_handles_labels()[0]:
        place: Any = {"bbox_to_anchor": (1.0, 1.0), "borderpad": 0, "frameon": False}
        axes.legend(loc="lower right", ncols=3, fontsize=8, **place)
    if path is not None:
        with atomic_write(path) as file:
            figure.savefig(file, format=Path(path).suffix[1:])
    return figure


def _label_powers(axis: Any) -> None:
    """Label an axis of exponents with whole powers of two."""
    axis.get_major_locator().set_params(integer=True, min_n_ticks=1)
    axis.set_major_formatter(_POWER)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``mlx_gradscale plot`` and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="mlx_gradscale plot",
        description="Plot the history of a run: loss, loss scale and gradient norm, "
        "with a mark at every skipped step.",
        epilog="example: mlx_gradscale plot run.csv -o run.svg",
    )
    add = parser.add_argument
    add("history", help=".csv file of a ScaleHistory")
    add("-o", "--output", help="image to write (default: HISTORY with suffix .png)")

    def draw() -> None:
        options = parser.parse_args(arguments)
        output = options.output or Path(options.history).with_suffix(".png")
        plot_history(options.history, output)
        print(output)

    return run_command(draw, (OSError, ValueError, ImportError))
