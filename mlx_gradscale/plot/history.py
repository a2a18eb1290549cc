"""Plot of a run over its steps, and the command ``mlx_gradscale plot``."""

import argparse
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..commands import run_command
from ..diagnostics import ScaleHistory, ScaleRecord
from .style import new_figure, save_figure, show_powers

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_PANELS = {"loss": "loss", "scale": "loss scale", "grad_norm": "gradient norm"}
# More lines than this would be a wall of red; the markers on the scale remain.
_MOST_LINES = 100


def main(arguments: Sequence[str] | None = None) -> int:
    """Plot the history in a file: ``mlx_gradscale plot run.csv -o run.png``.

    Args:
        arguments (list, optional): Default: the arguments of the process.

    Returns:
        int: 0, or 1 after an error, which is printed.
    """
    expected = (OSError, ValueError, ImportError)
    return run_command(lambda: _plot(arguments), expected, "mlx_gradscale plot: ")


def _plot(arguments: Sequence[str] | None) -> None:
    parser = argparse.ArgumentParser(
        prog="mlx_gradscale plot",
        description="Draw the history of a run: loss, loss scale with a mark on every "
        "skipped step, and gradient norm.",
        epilog="example: mlx_gradscale plot run.csv -o run.svg --dark",
    )
    parser.add_argument("history", help="a .csv or .jsonl file of a ScaleHistory")
    parser.add_argument(
        "-o", "--output", help="picture to write (default: HISTORY with .png)"
    )
    parser.add_argument("--dark", action="store_true", help="for a dark page")
    options = parser.parse_args(arguments)
    output = options.output or Path(options.history).with_suffix(".png")
    plot_history(options.history, output, dark=options.dark)
    print(output)


def plot_history(
    history: ScaleHistory | str | os.PathLike[str],
    path: str | os.PathLike[str] | None = None,
    *,
    dark: bool = False,
) -> "Figure":
    """Plot loss, loss scale and gradient norm, and mark every skipped step.

    Args:
        history (ScaleHistory or str): The history, or its ``.csv`` or ``.jsonl`` file.
        path (str, optional): Save the figure to this ``.png``, ``.svg`` or ``.pdf``.
        dark (bool): Use colours for a dark background. Default: ``False``.

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
    records = history.records
    if not records:
        raise ValueError("The history is empty. Record some steps first.")
    skipped = [record for record in records if not record.applied]
    names = [n for n in _PANELS if any(getattr(r, n) is not None for r in records)]
    size = (8.0, 0.7 + 1.55 * len(names))
    with new_figure(len(names), 1, size, dark) as (figure, panels, colors):
        for name, axes in zip(names, panels, strict=True):
            axes.set_ylabel(_PANELS[name])
            if name == "scale":
                _draw_scale(axes, records, skipped, colors)
            else:
                _draw_values(axes, records, name, colors)
                for record in skipped if len(skipped) <= _MOST_LINES else []:
                    axes.axvline(record.step, color=colors["alarm"], lw=0.6, alpha=0.5)
        panels[0].set_title(f"{len(records)} steps, {len(skipped)} skipped")
        panels[-1].set_xlabel("step")
        panels[-1].xaxis.get_major_locator().set_params(integer=True)
        figure.align_ylabels()
    return save_figure(figure, path)


def _draw_scale(
    axes: Any, records: list[ScaleRecord], skipped: Any, colors: dict[str, str]
) -> None:
    # Exponents on a linear axis: matplotlib's logarithmic axis shows only one label for
    # a scale that moves between two powers.
    steps, powers = zip(*((r.step, math.log2(r.scale)) for r in records), strict=True)
    axes.step(steps, powers, where="post", color=colors["line"], lw=1.6)
    if skipped:
        at = [r.step for r in skipped], [math.log2(r.scale) for r in skipped]
        axes.plot(*at, "v", color=colors["alarm"], label="skipped step", zorder=3)
        axes.legend(loc="best")
    axes.set_ylim(min(powers) - 1.5, max(powers) + 1.5)
    show_powers(axes.yaxis)


def _draw_values(
    axes: Any, records: list[ScaleRecord], name: str, colors: dict[str, str]
) -> None:
    values = [getattr(record, name) for record in records]
    # matplotlib leaves a gap at NaN, but cannot draw inf.
    values = [math.nan if x is None or not math.isfinite(x) else x for x in values]
    axes.plot([r.step for r in records], values, color=colors["line"], lw=1.2)
    finite = [x for x in values if math.isfinite(x)]
    if not finite:
        axes.set_yticks([])
        message = "inf or NaN in every step"
        place = {"ha": "center", "transform": axes.transAxes}
        axes.text(0.5, 0.5, message, color=colors["alarm"], **place)
    elif min(finite) > 0 and max(finite) > 50 * min(finite):
        axes.set_yscale("log")
