"""Bars in groups, for a narrow screen: a name, a bar, and what it stands for."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mlx_gradscale.plot.theme import canvas

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Inches and pixels per inch: 800 pixels, shown at 400 on a phone and sharp there.
WIDTH, DPI = 4.0, 200
_LINE, _EDGES = 0.185, 1.25
_NAME_SIZE, _SMALL = 8, 6.5


@dataclass(frozen=True)
class Bar:
    """One bar: ``base`` is drawn in grey first, ``value`` ends the whole of it.

    ``mark`` is a limit, drawn as a tick; ``low`` and ``high`` are quartiles.
    """

    name: str
    value: float
    text: str
    ours: bool
    low: float | None = None
    high: float | None = None
    base: float = 0.0
    mark: float | None = None

    @property
    def end(self) -> float:
        """Where the last of what is drawn ends, and the text begins."""
        return max(self.value, self.high or 0, self.mark or 0)


def draw(
    title: str,
    groups: dict[str, list[Bar]],
    axis: str,
    footer: str,
    dark: bool,
    one: bool = True,
) -> "Figure":
    """Draw groups of bars under each other.

    Args:
        title (str): The question.
        groups (dict): The bars of each group, by its name.
        axis (str): What the length of a bar is.
        footer (str): The machine, on the last lines.
        dark (bool): For a dark page.
        one (bool): Whether to draw a line at 1. Default: ``True``.
    """
    lines = sum(len(bars) + 1.3 for bars in groups.values())
    size = (WIDTH, _EDGES + _LINE * lines)
    with canvas(1, 1, dark, size, dpi=DPI) as (figure, all_axes, colors):
        axes = all_axes[0, 0]
        figure.suptitle(title, x=0.01, ha="left", fontsize=11, fontweight="bold")
        figure.supxlabel(footer, x=0.01, ha="left", fontsize=_SMALL)
        ends = [b.end for bars in groups.values() for b in bars]
        longest = max(len(b.text) for bars in groups.values() for b in bars)
        axes.set_xlim(0, max(ends) * (1.06 + 0.035 * longest))
        places = _draw_groups(axes, groups, colors)
        axes.set_yticks(list(places), list(places.values()), fontsize=_NAME_SIZE)
        axes.tick_params(axis="y", length=0)
        axes.tick_params(axis="x", labelsize=_NAME_SIZE)
        axes.grid(visible=False, axis="y")
        axes.set_ylim(lines - 0.2, -0.6)
        axes.set_xlabel(axis, fontsize=_NAME_SIZE, loc="right")
        if one:
            line = {"linewidth": 0.8, "linestyle": "--", "zorder": 1}
            axes.axvline(1, color=colors["text"], **line)
    return figure


def _draw_groups(
    axes: "Axes", groups: dict[str, list[Bar]], colors: dict[str, Any]
) -> dict[float, str]:
    places: dict[float, str] = {}
    behind = {"facecolor": colors["page"], "edgecolor": "none", "pad": 1}
    position = 0.0
    for name, bars in groups.items():
        # From the picture's edge: the name of a group is longer than that of a bar.
        where = ("figure fraction", "data")
        heading = axes.annotate(
            name, (0.01, position), xycoords=where, va="center", bbox=behind
        )
        heading.set(fontsize=_NAME_SIZE, fontweight="bold", annotation_clip=False)
        heading.set_in_layout(False)
        for bar in bars:
            position += 1
            places[position] = bar.name
            _draw_bar(axes, position, bar, colors)
        position += 1.3
    return places


def _draw_bar(axes: "Axes", position: float, bar: Bar, colors: dict[str, Any]) -> None:
    own = colors["line"] if bar.ours else colors["bar"]
    axes.barh(position, bar.base, color=colors["bar"], height=0.66, zorder=2)
    axes.barh(
        position, bar.value - bar.base, left=bar.base, color=own, height=0.66, zorder=2
    )
    if bar.low is not None and bar.high is not None:
        # Edged, or it would not stand out from a bar of its own colour.
        for color, width in ((colors["page"], 2.6), (colors["text"], 1)):
            ends, level = (bar.low, bar.high), (position, position)
            axes.plot(ends, level, color=color, lw=width, zorder=3)
    if bar.mark is not None:
        marks = (bar.mark, bar.mark)
        span = (position - 0.45, position + 0.45)
        axes.plot(marks, span, color=colors["text"], lw=1.6, zorder=4)
    axes.annotate(
        bar.text,
        (bar.end, position),
        xytext=(3, 0),
        textcoords="offset points",
        va="center",
        fontsize=_NAME_SIZE,
        bbox={"facecolor": colors["page"], "edgecolor": "none", "pad": 0.5},
    )
