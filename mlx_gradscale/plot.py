"""Plot runs, gradients and layers. Requires matplotlib, which ``[plot]`` installs."""

from __future__ import annotations

import argparse
import io
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
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
_SETTINGS = {
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 10,
    "grid.alpha": 0.4,
    "font.size": 9,
    "legend.frameon": False,
}
# Formats the exponent x as a power of two, in text and tick labels.
_POWER = "$2^{{{x:.0f}}}$"
_PANELS = {"loss": "loss", "scale": "loss scale", "grad_norm": "gradient norm"}
_LONG_RUN, _MOST_LAYERS = 500, 40
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

    A line has a gap where a value is inf or NaN. In a run of more than 500 steps, a
    running mean over one percent of the run is drawn over a paler line.

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
    steps = np.array([record.step for record in records])
    columns = {name: [getattr(r, name) for r in records] for name in _PANELS}
    columns = {n: xs for n, xs in columns.items() if any(x is not None for x in xs)}
    size = 8.0, 0.7 + 1.55 * len(columns)
    with _new_figure(len(columns), size, path) as (figure, panels):
        for axes, (name, column) in zip(panels, columns.items(), strict=True):
            values = np.array(column, float)  # None becomes NaN
            values[np.isinf(values)] = math.nan  # matplotlib leaves a gap
            _draw_line(axes, steps, values, name == "scale")
            axes.set_ylabel(_PANELS[name])
            if skipped:
                look: Any = {"color": _ALARM, "ms": 5, "label": "skipped step"}
                look |= {"transform": axes.get_xaxis_transform(), "clip_on": False}
                axes.plot(skipped, [1.0] * len(skipped), "v", **look)
        panels[0].set_title(f"{plural(len(records), 'step')}, {len(skipped)} skipped")
        _add_legend(panels[0])
        panels[-1].set_xlabel("step")
        figure.align_ylabels()
    return figure


def _draw_line(axes: Any, steps: Any, values: Any, is_scale: bool) -> None:
    # Without a marker, a value between two gaps would be invisible.
    look: Any = {"color": _LINE, "ms": 3, "mew": 0}
    finite = values[np.isfinite(values)]
    if is_scale:
        # Exponents on a linear axis: for a scale that moves between two powers,
        # matplotlib's logarithmic axis shows only one label.
        axes.step(steps, np.log2(values), ".-", where="post", **look)
        _label_powers(axes.yaxis)
        return
    if len(steps) <= _LONG_RUN:
        axes.plot(steps, values, ".-", **look)
    else:
        axes.plot(steps, values, color=_LINE, lw=0.6, alpha=0.35)
        window = np.ones(len(steps) // 100)
        total = np.convolve(np.nan_to_num(values), window, "same")
        count = np.convolve(np.isfinite(values), window, "same")
        mean = np.where(np.isfinite(values), total / np.maximum(count, 1), math.nan)
        axes.plot(steps, mean, color=_LINE, label="running mean")
    if finite.size and 0 < finite.min() < finite.max() / 50:
        axes.set_yscale("log")


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
    with _new_figure(2, (8.0, 4.9), path) as (figure, panels):
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
    return figure


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
    with _layer_figure(badness, title, path) as (figure, axes, shown):
        places = {name: i for i, name in enumerate(shown)}
        for is_float32, color in ((False, _LINE), (True, _ALARM)):
            found = [x for x in rows if x.layer in places]
            found = [row for row in found if row.is_float32 == is_float32]
            sizes = [limit - row.headroom for row in found]
            label = f"computes in {'float32' if is_float32 else dtype}"
            look: Any = {"color": color, "ms": 4, "label": label}
            axes.plot(sizes, [places[row.layer] for row in found], "o", **look)
        axes.axvline(limit, color=_ALARM, lw=1, label=f"{rows[0].maximum:.5g}")
        axes.set_xlabel("largest magnitude")
        _label_powers(axes.xaxis)
    return figure


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
    with _layer_figure(badness, report.verdict, path) as (figure, axes, shown):
        found = [report.layers[name] for name in shown]
        lines, look = range(len(found)), {"marker": "o", "ms": 4, "ls": ""}
        stuck = [x.stuck for x in found]
        axes.plot(stuck, lines, color=_BAR, label="weights that do not move", **look)
        lost = [x.lost for x in found]
        axes.plot(lost, lines, color=_LINE, label="lost update", **look)
        axes.xaxis.set_major_formatter(lambda x, _: f"{x:.0%}")
    return figure


@contextmanager
def _new_figure(
    rows: int, size: tuple[float, float], path: Output
) -> Iterator[tuple[Figure, list[Any]]]:
    """Yield a figure and its axes; on exit, save it to ``path`` if given."""
    try:
        import matplotlib
        import matplotlib.figure
    except ImportError as error:
        raise ImportError(
            "Plots require matplotlib. Run: pip install 'mlx_gradscale[plot]'"
        ) from error
    with matplotlib.rc_context(_SETTINGS):
        # Without pyplot, the figure opens no window and leaves no global state.
        new = matplotlib.figure.Figure
        figure = new(figsize=size, dpi=130, layout="constrained")
        yield figure, list(figure.subplots(rows, squeeze=False, sharex=True).flat)
        if path is not None:
            # Draw in memory first, so that an error leaves no file.
            data = io.BytesIO()
            figure.savefig(data, format=Path(path).suffix[1:])
            with atomic_write(path) as file:
                file.write(data.getbuffer())


@contextmanager
def _layer_figure(
    badness: dict[str, float], title: str, path: Output
) -> Iterator[tuple[Figure, Any, list[str]]]:
    """Yield a figure, axes with a row for each of the worst layers, and their names."""
    worst = sorted(badness, key=lambda name: -badness[name])[:_MOST_LAYERS]
    shown = [name for name in badness if name in worst]
    with _new_figure(1, (8.0, 1.2 + 0.14 * len(shown)), path) as (figure, (axes,)):
        yield figure, axes, shown
        axes.set_title(title, pad=20)
        axes.set_yticks(range(len(shown)), shown, fontsize=7)
        axes.set_ylim(len(shown) - 0.5, -0.5)
        _add_legend(axes)


def _label_powers(axis: Any) -> None:
    """Label an axis of exponents with whole powers of two."""
    axis.get_major_locator().set_params(integer=True, min_n_ticks=1)
    axis.set_major_formatter(_POWER)


def _add_legend(axes: Any) -> None:
    """Add a legend above the axes, each label once."""
    handles, labels = axes.get_legend_handles_labels()
    legend = dict(zip(labels, handles, strict=True))
    place: Any = {"loc": "lower right", "bbox_to_anchor": (1.0, 1.0), "borderpad": 0}
    if legend:
        axes.legend(legend.values(), legend, ncols=len(legend), **place)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``mlx_gradscale plot`` and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="mlx_gradscale plot",
        description="Plot the history of a run: loss, loss scale and gradient norm, "
        "with a mark at every skipped step. Runs of more than 500 steps also show a "
        "running mean.",
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
