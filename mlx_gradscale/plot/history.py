"""Plot the history of a run, in Python or with ``mlx_gradscale plot``."""

import argparse
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..commands import run_command
from ..diagnostics import ScaleHistory
from ..files.text import plural
from .style import Figure, Output, label_powers, new_figure

_PANELS = {"loss": "loss", "scale": "loss scale", "grad_norm": "gradient norm"}
# A longer run is drawn as a pale band with its running mean.
_LONG = 500


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


def plot_history(
    history: ScaleHistory | str | os.PathLike[str],
    path: Output = None,
) -> Figure:
    """Plot the loss, loss scale and gradient norm of a run, and mark skipped steps.

    Steps at which a value is inf or NaN have a background. In a run of more than 500
    steps, a running mean over one percent of the run is drawn over a paler line.

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
    size = (8.0, 0.7 + 1.55 * len(columns))
    with new_figure(len(columns), size, path) as (figure, panels, colors):
        for axes, (name, column) in zip(panels, columns.items(), strict=True):
            values = np.array(column, float)  # None becomes NaN
            is_bad = np.array([x is not None for x in column]) & ~np.isfinite(values)
            values[is_bad] = math.nan  # matplotlib leaves a gap
            _draw(axes, steps, values, name == "scale", colors)
            mark: Any = {"color": colors["lost"], "lw": 0.8, "label": "inf or NaN"}
            edges = np.flatnonzero(np.diff(is_bad, prepend=False, append=False))
            for first, end in edges.reshape(-1, 2):
                axes.axvspan(steps[first] - 0.5, steps[end - 1] + 0.5, **mark)
            if skipped:
                mark = {"color": colors["alarm"], "label": "skipped step", "ms": 5}
                mark |= {"transform": axes.get_xaxis_transform(), "clip_on": False}
                axes.plot(skipped, [1.0] * len(skipped), "v", **mark)
            axes.set_ylabel(_PANELS[name])
        panels[0].set_title(f"{plural(len(records), 'step')}, {len(skipped)} skipped")
        shown = [axes.get_legend_handles_labels() for axes in panels]
        legend = {x: h for hs, xs in shown for h, x in zip(hs, xs, strict=True)}
        if legend:
            place: Any = {"loc": "lower right", "bbox_to_anchor": (1.0, 1.0)}
            panels[0].legend(legend.values(), legend, ncols=len(legend), **place)
        panels[-1].set_xlabel("step")
        panels[-1].xaxis.get_major_locator().set_params(integer=True)
        figure.align_ylabels()
    return figure


def _draw(axes: Any, steps: Any, values: Any, is_scale: bool, colors: Any) -> None:
    # Without a marker, a value between two gaps would be invisible.
    look: Any = {"color": colors["line"], "lw": 1.2, "ms": 3, "mew": 0}
    if is_scale:
        # Plot exponents on a linear axis: for a scale that moves between two powers,
        # matplotlib's logarithmic axis shows only one label.
        axes.step(steps, np.log2(values), ".-", where="post", **look)
        label_powers(axes.yaxis)
        return
    finite = values[np.isfinite(values)]
    if len(steps) <= _LONG:
        axes.plot(steps, values, ".-", **look)
    else:
        axes.plot(steps, values, color=colors["line"], lw=0.6, alpha=0.35)
        window = np.ones(len(steps) // 100)
        total = np.convolve(np.nan_to_num(values), window, "same")
        count = np.convolve(np.isfinite(values), window, "same")
        mean = np.where(np.isfinite(values), total / np.maximum(count, 1), math.nan)
        axes.plot(steps, mean, color=colors["line"], lw=1.6, label="running mean")
    if finite.size and 0 < finite.min() < finite.max() / 50:
        axes.set_yscale("log")
