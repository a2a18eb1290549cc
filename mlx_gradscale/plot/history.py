"""The picture of a run: loss, loss scale and gradient norm over its steps."""

import math
import os
from typing import TYPE_CHECKING, Any

from ..diagnostics import ScaleHistory, ScaleRecord
from .theme import canvas, saved

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_LABELS = {"loss": "loss", "scale": "loss scale", "grad_norm": "gradient norm"}
# More lines than this would be a wall of red; the marks on the scale remain.
_MOST_LINES = 100


def plot_history(
    history: ScaleHistory | str | os.PathLike[str],
    path: str | os.PathLike[str] | None = None,
    *,
    dark: bool = False,
    title: str | None = None,
) -> "Figure":
    """Draw loss, loss scale and gradient norm, with a mark on every skipped step.

    Args:
        history (ScaleHistory or str): The run, or the file it was saved in.
        path (str, optional): Write the picture to this file, ``.png``, ``.svg`` or
            ``.pdf``.
        dark (bool): For a dark page. Default: ``False``.
        title (str, optional): Above the picture. Default: how many steps there
            were, and how many were skipped.

    Returns:
        Figure: A matplotlib figure, to change or to save.

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
        raise ValueError("The history is empty: record some steps first.")
    skipped = [record for record in records if not record.applied]
    names = [n for n in _LABELS if any(getattr(r, n) is not None for r in records)]
    size = (8.0, 0.7 + 1.55 * len(names))
    with canvas(len(names), 1, dark, size) as (figure, all_axes, colors):
        for name, axes in zip(names, all_axes.flat, strict=True):
            if name == "scale":
                _draw_scale(axes, records, skipped, colors)
            else:
                _draw_line(axes, records, name, colors)
                for record in skipped if len(skipped) <= _MOST_LINES else []:
                    axes.axvline(record.step, color=colors["alarm"], lw=0.6, alpha=0.5)
            axes.set_ylabel(_LABELS[name])
        all_axes.flat[-1].set_xlabel("step")
        all_axes.flat[-1].xaxis.get_major_locator().set_params(integer=True)
        title = title or f"{len(records)} steps, {len(skipped)} skipped"
        all_axes.flat[0].set_title(title, loc="left", fontweight="bold")
        figure.align_ylabels()
    return saved(figure, path)


def _draw_scale(
    axes: "Axes",
    records: list[ScaleRecord],
    skipped: list[ScaleRecord],
    colors: dict[str, str],
) -> None:
    steps, scales = [r.step for r in records], [r.scale for r in records]
    axes.step(steps, scales, where="post", color=colors["line"], lw=1.6)
    if skipped:
        axes.plot(
            [record.step for record in skipped],
            [record.scale for record in skipped],
            linestyle="",
            marker="v",
            markersize=6,
            color=colors["alarm"],
            label="skipped step",
            zorder=3,
        )
        axes.legend(loc="best", frameon=False)
    axes.set_yscale("log", base=2)
    # One power and a half of room, so that no mark is cut and a constant scale
    # has an axis too.
    axes.set_ylim(min(scales) / 2.8, max(scales) * 2.8)
    axes.minorticks_off()


def _draw_line(
    axes: "Axes", records: list[ScaleRecord], name: str, colors: dict[str, str]
) -> None:
    values = [getattr(record, name) for record in records]
    # matplotlib leaves a gap for NaN and gives up on inf.
    values = [math.nan if x is None or not math.isfinite(x) else x for x in values]
    axes.plot([r.step for r in records], values, color=colors["line"], lw=1.2)
    found = [x for x in values if math.isfinite(x)]
    if not found:
        axes.set_yticks([])
        place: dict[str, Any] = {
            "ha": "center",
            "va": "center",
            "transform": axes.transAxes,
        }
        axes.text(0.5, 0.5, "inf or NaN in every step", color=colors["alarm"], **place)
    if found and min(found) > 0 and max(found) > 50 * min(found):
        axes.set_yscale("log")
