"""``python -m benchmarks``: measure, print, and fail if a count is wrong."""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import mlx.core as mx

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
    parser.add_argument(
        "--only", nargs="+", choices=list(sections(1, 1)), help="Sections to run."
    )
    parser.add_argument("--rounds", type=int, help="Rounds of each comparison.")
    parser.add_argument(
        "--largest",
        type=int,
        default=64,
        metavar="M",
        help="Million parameters to grow to, at most 256 (5 GB).",
    )
    return parser


# MLX's CPU allocator keeps 32 MB of free buffers, Metal's as good as all. With 32
# MB a step of 8 M parameters gives 64 MB back to the system and faults 7,600 pages
# in again, in some runs and not in others: 25 ms or 43 ms for the same work.
CACHE_LIMIT = 4 * 2**30

Results = tuple[list[Row], list[Figure]]


def sections(rounds: int, largest: int) -> dict[str, Callable[[], Results]]:
    """Every section by its name, in the order of the table."""
    main = trees.shapes_of(trees.MAIN)
    return {
        "counts": lambda: ([], counts.measure()),
        "phase": lambda: phase_rows.measure(rounds),
        "skipped": lambda: (phase_rows.skipped(rounds, main), []),
        "reading": lambda: reading.measure(rounds, main),
        "step": lambda: whole_step.measure(rounds, 128, 2),
        "parameters": lambda: growth.with_parameters(rounds, largest),
        "leaves": lambda: growth.with_leaves(rounds, 5000),
        "first-call": lambda: ([], first_call.measure(32)),
        "torch": lambda: torch_peer.measure(rounds, main),
    }


def quick_sections(rounds: int) -> dict[str, Callable[[], Results]]:
    """The counts, and enough rows to see that the suite works."""
    main = trees.shapes_of(trees.MAIN)
    return {
        "counts": lambda: ([], counts.measure()),
        "phase": lambda: phase_rows.quick(rounds),
        "skipped": lambda: (phase_rows.skipped(rounds, main[:8]), []),
        "reading": lambda: reading.measure(rounds, main),
    }


def run(chosen: dict[str, Callable[[], Results]]) -> Results:
    """Measure the sections and print each at once: somebody may stop the run."""
    rows: list[Row] = []
    figures: list[Figure] = []
    for measure in chosen.values():
        more_rows, more_figures = measure()
        print(f"\n{report.tables(more_rows, more_figures)}", flush=True)
        rows += more_rows
        figures += more_figures
    return rows, figures


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return 1 if a count is wrong, never because of seconds."""
    options = build_parser().parse_args(arguments)
    if options.quick:
        chosen = quick_sections(options.rounds or 5)
    else:
        chosen = sections(options.rounds or 15, options.largest)
    print("\n".join(f"{k}: {v}" for k, v in report.environment().items()))
    before = mx.set_cache_limit(CACHE_LIMIT)
    try:
        rows, figures = run(
            {n: f for n, f in chosen.items() if not options.only or n in options.only}
        )
    finally:
        mx.set_cache_limit(before)
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
