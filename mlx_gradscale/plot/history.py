"""Plot the history of a run, in Python or with ``mlx_gradscale plot``."""

import argparse
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..commands import run_command
from ..diagnostics import ScaleHistory
from ..files.text import plural
from .style import Figure, Output, label_powers, new_figure

_PANELS = {"loss": "loss", "scale": "loss scale", "grad_norm": "gradient norm"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``mlx_gradscale plot`` and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="mlx_gradscale plot",
        description="Plot the history of a run: loss, loss scale and gradient norm, "
        "with a mark at every skipped step.",
        epilog="example: mlx_gradscale plot run.csv -o run.svg --dark",
    )
    add = parser.add_argument
    add("history", help=".csv file of a ScaleHistory")
    add("-o", "--output", help="image to write (default: HISTORY with suffix .png)")
    add("--dark", action="store_true", help="use a dark background")

    def draw() -> None:
        options = parser.parse_args(arguments)
        output = options.output or Path(options.history).with_suffix(".png")
        plot_history(options.history, output, dark=options.dark)
        print(output)

    return run_command(draw, (OSError, ValueError, ImportError))


def plot_history(
    history: ScaleHistory | str | os.PathLike[str],
    path: Output = None,
    *,
    dark: bool = False,
) -> Figure:
    """Plot the loss, loss scale and gradient norm of a run, and mark skipped steps.

    Args:
        history (ScaleHistory or str): The history, or its ``.csv`` file.
        path (str, optional): The ``.png``, ``.svg`` or ``.pdf`` file to write.
        dark (bool): Use colors for a dark background. Default: ``False``.

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
    steps = [record.step for record in records]
    columns = {name: [getattr(r, name) for r in records] for name in _PANELS}
    columns = {n: xs for n, xs in columns.items() if any(x is not None for x in xs)}
    # Plot exponents on a linear axis: for a scale that moves between two powers,
    # matplotlib's logarithmic axis shows only one label.
    columns["scale"] = list(map(math.log2, columns["scale"]))
    size = (8.0, 0.7 + 1.55 * len(columns))
    with new_figure(len(columns), size, dark, path) as (figure, panels, colors):
        for axes, (name, values) in zip(panels, columns.items(), strict=True):
            # matplotlib leaves a gap at NaN, but cannot draw inf. Without a marker, a
            # value between two gaps would be invisible.
            finite = [x for x in values if x is not None and math.isfinite(x)]
            drawn = [math.nan if x is None or math.isinf(x) else x for x in values]
            look: Any = {"color": colors["line"], "lw": 1.2, "ms": 3, "mew": 0}
            if name == "scale":
                axes.step(steps, drawn, ".-", where="post", **look)
                label_powers(axes.yaxis)
            else:
                axes.plot(steps, drawn, ".-", **look)
                if finite and 0 < min(finite) < max(finite) / 50:
                    axes.set_yscale("log")
            if skipped:
                mark: Any = {"color": colors["alarm"], "label": "skipped step", "ms": 5}
                mark |= {"transform": axes.get_xaxis_transform(), "clip_on": False}
                axes.plot(skipped, [1.0] * len(skipped), "v", **mark)
            axes.set_ylabel(_PANELS[name])
        panels[0].set_title(f"{plural(len(records), 'step')}, {len(skipped)} skipped")
        if skipped:
            panels[0].legend(loc="lower right", bbox_to_anchor=(1.0, 1.0))
        panels[-1].set_xlabel("step")
        panels[-1].xaxis.get_major_locator().set_params(integer=True)
        figure.align_ylabels()
    return figure
