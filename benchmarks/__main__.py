"""``python -m benchmarks``: run all benchmarks, or only the given ones."""

import argparse
import importlib
import json
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mlx_gradscale.files.text import align

from .harness import Rows, describe_machine, keep_freed_memory

QUESTIONS = ("steps", "peak_memory", "recomputation", "checkpoints")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmarks, print their tables, and write the requested file."""
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
    options = parser.parse_args(arguments)
    for name in options.names:
        if name not in QUESTIONS:
            parser.error(f"{name!r} is not a benchmark. Use: {', '.join(QUESTIONS)}.")
    machine = describe_machine()
    print("\n".join(f"{key}: {value}" for key, value in machine.items()))
    results: dict[str, Any] = {"machine": machine, "quick": options.quick, "tables": {}}
    # The models are not meant to learn, so warnings about training are noise.
    warnings.simplefilter("ignore")
    for name in options.names or QUESTIONS:
        module = importlib.import_module(f".{name}", __package__)
        question, explanation = (module.__doc__ or "").split("\n\n")[:2]
        print(f"\n{name}: {question}\n{explanation.rstrip()}\n", flush=True)
        rows: Rows = module.measure(options.quick)
        results["tables"][name] = rows
        n_names = sum(isinstance(value, str) for value in rows[0].values())
        print(align([[*rows[0]], *(row.values() for row in rows)], n_names), flush=True)
        if options.json:  # after each table, because a long run may be stopped
            options.json.write_text(json.dumps(results, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    keep_freed_memory()
    sys.exit(main())
