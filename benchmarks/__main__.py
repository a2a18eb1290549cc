"""``python -m benchmarks``: measure, print, and fail if a count is wrong."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from . import machine, report
from .comparison import say
from .results import Results
from .sections import FULL, QUICK


def build_parser() -> argparse.ArgumentParser:
    """Return the command's parser."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description="What the scaler costs here."
    )
    parser.add_argument(
        "--quick", action="store_true", help="Counts and a few small rows."
    )
    parser.add_argument("--only", nargs="+", choices=FULL, help="Sections to run.")
    parser.add_argument("--rounds", type=int, help="Rounds of each comparison.")
    parser.add_argument("--json", type=Path, metavar="FILE", help="Write all numbers.")
    parser.add_argument(
        "--pictures", type=Path, metavar="FOLDER", help="Draw them, light and dark."
    )
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return 1 if a count is wrong, never because of seconds."""
    parser = build_parser()
    options = parser.parse_args(arguments)
    known = QUICK if options.quick else FULL
    names = options.only or known
    if missing := [name for name in names if name not in known]:
        parser.error(f"--quick has no {missing}: leave out --quick.")
    rounds = options.rounds or (3 if options.quick else 15)
    results = Results(machine.describe(), {})
    print("\n".join(f"{k}: {v}" for k, v in results.machine.items()), flush=True)
    for name in names:
        say(f"== {name}")
        results.sections[name] = known[name](rounds)
        # At once: somebody may stop the run.
        print(f"\n{report.section(name, results.sections[name])}", flush=True)
        if options.json:
            results.save(options.json)
    if options.pictures:
        from .drawing import draw_all

        draw_all(results, options.pictures)
    say("done")
    for figure in results.wrong_counts():
        print(f"Wrong: {figure.name} is {figure.value:g}, at most {figure.bar:g}.")
    return 1 if results.wrong_counts() else 0


if __name__ == "__main__":
    machine.keep_freed_memory()
    sys.exit(main())
