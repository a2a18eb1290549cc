"""``python -m benchmarks.publish``: the README's tables and pictures from a file.

A table stands between ``<!-- begin NAME -->`` and ``<!-- end NAME -->``, where NAME is
one of :data:`BLOCKS`, or ``rows``, ``points`` or ``figures`` and a section's name.
"""

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from . import by_optimizer, growth, machine, report
from .results import Results

_HERE = Path(__file__).parent
_BLOCK = re.compile(r"(<!-- begin (.+?) -->\n).*?(<!-- end \2 -->)", re.DOTALL)


def fill(text: str, results: Results) -> str:
    """Return the text with every block written anew from the results."""

    def block(found: re.Match) -> str:
        begin, name, end = found.groups()
        return f"{begin}{_block(name, results)}\n{end}"

    return _BLOCK.sub(block, text)


def _block(name: str, results: Results) -> str:
    if name in BLOCKS:
        return BLOCKS[name](results)
    kind, _, section = name.partition(" ")
    if kind not in ("rows", "points", "figures"):
        raise ValueError(f"No table is called {name!r}: use one of {list(BLOCKS)}.")
    if section not in results.sections:
        raise ValueError(
            f"The results have no section {section!r}: measure without --only."
        )
    return getattr(report, kind)(getattr(results.sections[section], kind))


def the_machine(results: Results) -> str:
    """Return what the numbers were measured on, and whether it was at rest."""
    found, load = results.machine, results.machine["load when it began"]
    compiler = found.get("compiler of the kernels")
    more = f", kernels by {compiler}" if compiler else ""
    text = f"{machine.in_a_line(found)}{more}."
    if load > found["cores"] / 2:
        text += f" **The machine was busy (load {load}): these numbers are rough.**"
    return text


def bars(results: Results) -> str:
    """Return every figure that has a bar."""
    return report.figures(f for f in results.figures() if f.bar is not None)


def optimizers(results: Results) -> str:
    """Return the ratio of every optimizer, beside its limit."""
    cases = results.sections["by-optimizer"].cases()
    names = dict.fromkeys(case.rpartition(", ")[0] for case in cases)
    heads = {"optimizer": "left"} | dict.fromkeys(by_optimizer.DTYPES, "right")
    lines = []
    for name in names:
        limit = by_optimizer.limit(name)
        ratios = [cases[f"{name}, {x}"][-1].ratio for x in by_optimizer.DTYPES]
        lines.append(
            [name, *(f"{x:.2f}" for x in ratios), f"{limit:.2f}" if limit else ""]
        )
    return report.table(heads | {"limit by passes, float32": "right"}, lines)


def sizes(results: Results) -> str:
    """Return the growth of each measure, ours against bare at every size."""
    points = results.sections["growth"].points
    heads = {"tree": "left"} | {f"{what} / bare": "right" for what in growth.MEASURES}
    lines = []
    for axis in (growth.PARAMETERS, growth.LEAVES):
        pairs = {
            what: [
                growth.curve(points, axis, variant, what)
                for variant in (growth.BARE, growth.WRAPPER)
            ]
            for what in growth.MEASURES
        }
        amounts = next(iter(pairs.values()))[0][0]
        for i, amount in enumerate(amounts):
            ratios = [ours[1][i] / bare[1][i] for bare, ours in pairs.values()]
            lines.append([f"{amount:,} {axis}", *(f"{x:.2f}" for x in ratios)])
    return report.table(heads, lines)


BLOCKS: dict[str, Callable[[Results], str]] = {
    "machine": the_machine,
    "bars": bars,
    "by optimizer": optimizers,
    "by size": sizes,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw the pictures and write the tables of a saved run."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.publish",
        description="The README's tables and pictures from saved results.",
    )
    parser.add_argument(
        "results",
        nargs="?",
        type=Path,
        default=_HERE / "results.json",
        help="What --json has written. Default: benchmarks/results.json.",
    )
    parser.add_argument("--readme", type=Path, default=_HERE / "README.md")
    parser.add_argument("--pictures", type=Path, default=_HERE / "pictures")
    options = parser.parse_args(arguments)
    from .drawing import draw_all

    results = Results.load(options.results)
    text = fill(options.readme.read_text(encoding="utf-8"), results)
    draw_all(results, options.pictures)
    options.readme.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
