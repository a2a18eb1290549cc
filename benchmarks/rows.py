"""A measured row and a measured figure: plain data that report and picture share."""

from dataclasses import dataclass

from .timing import Timing


@dataclass(frozen=True)
class Row:
    """One variant in one interleaved comparison. Ratios are to its baseline."""

    section: str
    case: str
    variant: str
    milliseconds: float
    best: float
    ratio: float
    low: float
    high: float
    best_ratio: float


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


def rows_of(section: str, case: str, timings: dict[str, Timing]) -> list[Row]:
    """Turn the timings of one comparison into rows."""
    return [
        Row(
            section,
            case,
            name,
            timing.median * 1e3,
            timing.best * 1e3,
            timing.ratio,
            *timing.spread,
            timing.best_ratio,
        )
        for name, timing in timings.items()
    ]
