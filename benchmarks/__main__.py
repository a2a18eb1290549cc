"""``python -m benchmarks``: run all benchmarks, or only the given ones."""

import argparse
import importlib
import json
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import chart
from .harness import Rows, describe_machine, keep_freed_memory

QUESTIONS = (
    "optimizer_phase",
    "bytes_and_kernels",
    "peak_memory",
    "recomputation",
    "checkpoints",
    "pytorch",
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmarks, print their tables, and write the requested files."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Measure the cost of loss scaling on this machine.",
    )
    parser.add_argument(
        "names",
        nargs="*",
        metavar="NAME",
        help=f"any of {', '.join(QUESTIONS)} (default: all)",
    )
    parser.add_argument(
        "--quick", action="store_true", help="run small cases, in about two minutes"
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write all tables to a JSON file"
    )
    parser.add_argument("--chart", type=Path, metavar="FILE", help="plot the ratios")
    options = parser.parse_args(arguments)
    for name in options.names:
        if name not in QUESTIONS:
            parser.error(f"{name!r} is not a benchmark. Use: {', '.join(QUESTIONS)}.")
    names = options.names or QUESTIONS
    if options.chart and "optimizer_phase" not in names:
        parser.error("--chart plots optimizer_phase. Add it to the names.")
    machine = describe_machine()
    print("\n".join(f"{key}: {value}" for key, value in machine.items()))
    results: dict[str, Any] = {"machine": machine, "quick": options.quick, "tables": {}}
    # The models are not meant to learn, so warnings about training are noise.
    warnings.simplefilter("ignore")
    for name in names:
        module = importlib.import_module(f".{name}", __package__)
        question, explanation = (module.__doc__ or "").split("\n\n")[:2]
        print(f"\n{name}: {question}\n{explanation.rstrip()}\n", flush=True)
        rows = module.measure(options.quick)
        results["tables"][name] = rows
        print(table(rows), flush=True)
        if options.json:  # after each table, because a long run may be stopped
            options.json.write_text(json.dumps(results, indent=1) + "\n")
    if options.chart:
        rows = results["tables"]["optimizer_phase"]
        note = f"{machine['device']}, MLX {machine['mlx']}"
        chart.draw(rows, options.chart, note)
    return 0


def table(rows: Rows) -> str:
    """Return rows as aligned text, with numbers right-aligned.

    Example:
        >>> print(table([{"case": "AdamW", "ratio": 1.2}]))
        case   ratio
        AdamW    1.2
    """
    lines = [list(rows[0]), *(list(row.values()) for row in rows)]
    widths = [max(len(str(line[i])) for line in lines) for i in range(len(lines[0]))]
    numeric = [isinstance(value, int | float) for value in rows[0].values()]
    text = [
        "  ".join(
            str(cell).rjust(width) if is_number else str(cell).ljust(width)
            for cell, width, is_number in zip(line, widths, numeric, strict=True)
        ).rstrip()
        for line in lines
    ]
    return "\n".join(text)


if __name__ == "__main__":
    keep_freed_memory()
    sys.exit(main())
