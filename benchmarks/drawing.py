"""The pictures, one per question, light and dark. Needs matplotlib."""

import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from mlx_gradscale.plot.theme import saved

from . import by_optimizer, curves, machine
from .bars import Bar, draw
from .results import Results
from .rows import Row, Section

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RATIO = "time / the same without it"


def draw_all(results: Results, folder: Path) -> list[Path]:
    """Draw every picture whose section was measured; return the files."""
    folder.mkdir(parents=True, exist_ok=True)
    footer = footer_of(results)
    found = []
    for name, (needed, paint) in PICTURES.items():
        section = results.sections.get(needed)
        if section is None or not (section.rows or section.points):
            continue
        for theme in ("light", "dark"):
            path = folder / f"{name}-{theme}.png"
            saved(paint(section, footer, theme == "dark"), path)
            found.append(path)
    return found


def footer_of(results: Results) -> str:
    """Return the machine, in lines that fit under a picture."""
    return textwrap.fill(machine.in_a_line(results.machine), 84)


def _cost(section: Section, footer: str, dark: bool) -> "Figure":
    groups = {
        case: [_bar(row, ours=True) for row in rows[1:]]
        for case, rows in section.cases().items()
    }
    return draw("What does it cost?", groups, RATIO, footer, dark)


def _by_hand(section: Section, footer: str, dark: bool) -> "Figure":
    groups = {
        case: [_bar(row, ours="Scale" in row.variant) for row in rows]
        for case, rows in section.cases().items()
    }
    title = "Against what people write"
    return draw(title, groups, "time / the first of its group", footer, dark)


def _by_optimizer(section: Section, footer: str, dark: bool) -> "Figure":
    groups = {}
    for label in by_optimizer.DTYPES:
        bars = groups.setdefault(label, [])
        for case, rows in section.cases().items():
            name, _, kind = case.rpartition(", ")
            if kind == label:
                # Float16 gradients are computed in another dtype when bare.
                mark = by_optimizer.limit(name) if kind.startswith("float32") else None
                bars.append(_bar(rows[-1], ours=True, name=name, mark=mark))
    groups = {
        key + (", | is the limit by passes" if bars[0].mark else ""): bars
        for key, bars in groups.items()
    }
    return draw("By optimizer", groups, RATIO, footer, dark)


def _by_size(section: Section, footer: str, dark: bool) -> "Figure":
    return curves.draw("By size", section.points, footer, dark)


def _torch(section: Section, footer: str, dark: bool) -> "Figure":
    bars = []
    for case, (bare, scaled) in section.cases().items():
        # By the paired medians: a difference of medians is mostly noise.
        end = max(bare.milliseconds + scaled.added, 0)
        percent = 100 * (scaled.ratio - 1)
        text = f"{scaled.added:+.1f} ms, {percent:+.0f}%"
        base = min(bare.milliseconds, end)
        bars.append(Bar(case, end, text, ours=True, base=base))
    groups = {"AdamW, 8 M: bare in grey, what a scaler adds in blue": bars}
    return draw("Against PyTorch", groups, "ms per step", footer, dark, one=False)


def _bar(
    row: Row, ours: bool, name: str | None = None, mark: float | None = None
) -> Bar:
    text = f"{row.ratio:.2f}"
    low, high = row.low, row.high
    return Bar(name or row.variant, row.ratio, text, ours, low, high, mark=mark)


Painter = Callable[[Section, str, bool], "Figure"]
# Each with the section that it shows.
PICTURES: dict[str, tuple[str, Painter]] = {
    "cost": ("cost", _cost),
    "by-hand": ("by-hand", _by_hand),
    "by-optimizer": ("by-optimizer", _by_optimizer),
    "by-size": ("growth", _by_size),
    "torch": ("torch", _torch),
}
