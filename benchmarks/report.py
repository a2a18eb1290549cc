"""Rows, figures and points as Markdown tables, which are tables on the screen too."""

from collections.abc import Iterable

from .rows import Figure, Point, Row, Section

_MET = {None: "", True: "met", False: "missed"}


def section(name: str, found: Section) -> str:
    """Return all tables of a section under its name."""
    tables = [f"## {name}"]
    tables += [rows(found.rows)] if found.rows else []
    tables += [points(found.points)] if found.points else []
    tables += [figures(found.figures)] if found.figures else []
    return "\n\n".join(tables)


def table(heads: dict[str, str], lines: Iterable[Iterable[str]]) -> str:
    """Return a Markdown table.

    Args:
        heads (dict): Each column's head and ``"left"`` or ``"right"``.
        lines (Iterable): The cells of each line.
    """
    sides = {"left": "---", "right": "---:"}
    rule = (sides[side] for side in heads.values())
    return "\n".join(f"| {' | '.join(x)} |" for x in (heads, rule, *lines))


def rows(found: Iterable[Row]) -> str:
    """Return every row with its time, ratio and quartiles."""
    heads = {"case": "left", "variant": "left"} | dict.fromkeys(
        ("median ms", "best ms", "added ms", "ratio", "quartiles"), "right"
    )
    return table(
        heads,
        (
            (
                r.case,
                r.variant,
                f"{r.milliseconds:.2f}",
                f"{r.best:.2f}",
                f"{r.added:.2f}",
                f"{r.ratio:.2f}",
                f"{r.low:.2f}-{r.high:.2f}",
            )
            for r in found
        ),
    )


def points(found: Iterable[Point]) -> str:
    """Return every point of a growing tree."""
    heads = {"tree": "left", "variant": "left"} | dict.fromkeys(
        ("ms per step", "first call, s", "peak MB"), "right"
    )
    return table(
        heads,
        (
            (
                f"{p.amount:,} {p.axis}",
                p.variant,
                f"{p.milliseconds:.2f}",
                f"{p.first_call / 1e3:.3f}",
                f"{p.peak_bytes / 1e6:.1f}",
            )
            for p in found
        ),
    )


def figures(found: Iterable[Figure]) -> str:
    """Return figures with their bars."""
    heads = {"figure": "left", "value": "right", "at most": "right"}
    return table(
        heads | {"": "left", "note": "left"},
        (
            (
                f.name,
                f"{f.value:.3g}{' ' + f.unit if f.unit else ''}",
                "" if f.bar is None else f"{f.bar:g}",
                _MET[f.met],
                f.note,
            )
            for f in found
        ),
    )
