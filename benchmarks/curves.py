"""How the cost grows, in panels: what is measured downwards, what grows across."""

from typing import TYPE_CHECKING, Any

from mlx_gradscale.plot.theme import canvas

from . import growth
from .bars import DPI, WIDTH
from .rows import Point
from .timing import exponent

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_UNITS = {
    "time per step": ("ms per step", 1.0),
    "first call": ("first call, s", 1e-3),
    "peak memory": ("peak memory, MB", 1e-6),
}
# Grey and blue differ for everybody; markers and dashes differ without colour.
_STYLES = {
    growth.BARE: {"marker": "s", "linestyle": "--", "theme": "bar"},
    growth.WRAPPER: {"marker": "o", "linestyle": "-", "theme": "line"},
}


def draw(title: str, points: list[Point], footer: str, dark: bool) -> "Figure":
    """Draw time, first call and peak memory over parameters and over leaves."""
    share = {"sharex": "col", "sharey": "row"}
    with canvas(3, 2, dark, (WIDTH, 5.6), dpi=DPI, share=share) as (
        figure,
        all_axes,
        colors,
    ):
        figure.suptitle(title, x=0.01, ha="left", fontsize=11, fontweight="bold")
        figure.supxlabel(footer, x=0.01, ha="left", fontsize=6.5)
        for row, what in zip(all_axes, growth.MEASURES, strict=True):
            row[0].set_ylabel(_UNITS[what][0], fontsize=8)
            for axes, axis in zip(row, (growth.PARAMETERS, growth.LEAVES), strict=True):
                _draw_panel(axes, points, axis, what, colors)
        for axes, label in zip(
            all_axes[-1], ("parameters", "leaves of 64"), strict=True
        ):
            axes.set_xlabel(label, fontsize=8)
        figure.align_ylabels()
        figure.legend(
            *all_axes[0, 0].get_legend_handles_labels(),
            loc="outside upper right",
            ncols=2,
            fontsize=8,
            frameon=False,
        )
    return figure


def _draw_panel(
    axes: "Axes", points: list[Point], axis: str, what: str, colors: dict[str, Any]
) -> None:
    from matplotlib.ticker import EngFormatter

    factor, slopes = _UNITS[what][1], []
    for variant, style in _STYLES.items():
        amounts, values = growth.curve(points, axis, variant, what)
        slopes.append(exponent(amounts, values))
        axes.plot(
            amounts,
            [factor * value for value in values],
            label=variant,
            color=colors[style["theme"]],
            marker=style["marker"],
            linestyle=style["linestyle"],
            markersize=4,
            linewidth=1.4,
        )
    axes.set(xscale="log", yscale="log")
    axes.minorticks_off()
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.yaxis.set_major_formatter("{x:,g}")
    axes.tick_params(labelsize=8)
    bare, ours = slopes
    note = f"slope {ours:.2f}, bare {bare:.2f}"
    axes.set_title(note, fontsize=8, loc="left")
