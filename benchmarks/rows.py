"""What is measured, as plain data: rows, figures and points, by section."""

from dataclasses import dataclass, field

from .timing import Timing


@dataclass(frozen=True)
class Row:
    """One variant in one interleaved comparison, against the first of its case.

    ``ratio`` and ``added`` (milliseconds) are medians over the rounds; ``low`` and
    ``high`` are the quartiles of the rounds' ratios.
    """

    case: str
    variant: str
    milliseconds: float
    best: float
    ratio: float
    low: float
    high: float
    added: float


@dataclass(frozen=True)
class Figure:
    """One number, with the bar that it has to stay below, if there is one.

    ``counted`` tells that it is a count and not a time, so that it has to hold on
    every machine.
    """

    name: str
    value: float
    unit: str = ""
    bar: float | None = None
    counted: bool = False
    note: str = ""

    @property
    def met(self) -> bool | None:
        return None if self.bar is None else self.value <= self.bar


@dataclass(frozen=True)
class Point:
    """One variant at one size of a tree that grows along ``axis``."""

    axis: str
    amount: int
    variant: str
    milliseconds: float
    first_call: float
    peak_bytes: int


@dataclass(frozen=True)
class Section:
    """All that one section of the suite has measured."""

    rows: list[Row] = field(default_factory=list)
    figures: list[Figure] = field(default_factory=list)
    points: list[Point] = field(default_factory=list)

    def row(self, case: str, variant: str) -> Row:
        """Return the row of a variant."""
        return next(r for r in self.rows if (r.case, r.variant) == (case, variant))

    def cases(self) -> dict[str, list[Row]]:
        """Return the rows by case, in their order."""
        found: dict[str, list[Row]] = {}
        for row in self.rows:
            found.setdefault(row.case, []).append(row)
        return found


def rows_of(case: str, timings: dict[str, Timing]) -> list[Row]:
    """Turn the timings of one comparison into rows."""
    return [
        Row(
            case,
            name,
            timing.median * 1e3,
            timing.best * 1e3,
            timing.ratio,
            *timing.spread,
            timing.added * 1e3,
        )
        for name, timing in timings.items()
    ]
