"""``python -m benchmarks``: measure, print, and fail if a count is wrong."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from . import (
    counts,
    first_call,
    growth,
    phase_rows,
    picture,
    reading,
    report,
    torch_peer,
    trees,
    whole_step,
)
from .rows import Figure, Row


def build_parser() -> argparse.ArgumentParser:
    """Return the command's parser."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description="What the scaler costs here."
    )
    parser.add_argument(
        "--quick", action="store_true", help="Counts and a few small rows."
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="Write all numbers.")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="Write a picture.")
    parser.add_argument("--rounds", type=int, help="Rounds of each comparison.")
    parser.add_argument(
        "--largest",
        type=int,
        default=64,
        metavar="M",
        help="Million parameters to grow to, at most 256 (5 GB).",
    )
    return parser


def quick(rounds: int) -> tuple[list[Row], list[Figure]]:
    """The counts, and enough rows to see that the suite works."""
    rows = phase_rows.measure(rounds, quick=True)
    rows += phase_rows.skipped(rounds, trees.shapes_of(trees.MAIN)[:8])
    found, figures = reading.measure(rounds, trees.shapes_of(trees.MAIN))
    return rows + found, [*counts.measure(), *figures]


def full(rounds: int, largest: int) -> tuple[list[Row], list[Figure]]:
    """Everything."""
    main = trees.shapes_of(trees.MAIN)
    figures = counts.measure()
    rows = phase_rows.measure(rounds, quick=False)
    figures += phase_rows.figures(rows)
    rows += phase_rows.skipped(rounds, main)
    for found, more in (
        reading.measure(rounds, main),
        whole_step.measure(rounds, 128, 2),
        growth.with_parameters(rounds, largest),
        growth.with_leaves(rounds, 5000),
    ):
        rows += found
        figures += more
    figures += first_call.measure(32)
    if torch_peer.available():
        found, added = torch_peer.measure(rounds, main)
        rows += found
        figures += torch_peer.figures(added, _added(rows))
    return rows, figures


def _added(rows: list[Row]) -> float:
    bare, ours = (
        next(r for r in rows if r.variant == variant and "AdamW, float32" in r.case)
        for variant in ("bare compiled", "scaler compiled")
    )
    millions = trees.size(trees.shapes_of(trees.MAIN)) / 1e6
    return (ours.milliseconds - bare.milliseconds) / 1e3 / millions


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return 1 if a count is wrong, never because of seconds."""
    options = build_parser().parse_args(arguments)
    rounds = options.rounds or (5 if options.quick else 15)
    if options.quick:
        rows, figures = quick(rounds)
    else:
        rows, figures = full(rounds, options.largest)
    print("\n".join(f"{k}: {v}" for k, v in report.environment().items()))
    print(f"\n{report.table(rows)}\n\n{report.figure_table(figures)}")
    if options.json:
        options.json.write_text(report.as_json(rows, figures))
    if options.plot:
        picture.draw([r for r in rows if r.section == phase_rows.SECTION], options.plot)
    wrong = [f for f in figures if f.counted and not f.met]
    for figure in wrong:
        print(f"Wrong: {figure.name} is {figure.value:g}, at most {figure.bar:g}.")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
