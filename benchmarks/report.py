"""The results as a table on the screen, as JSON and as Markdown."""

import json
import os
import platform
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import mlx.core as mx

from .rows import Figure, Row


def environment() -> dict[str, Any]:
    """The machine, device and versions that the numbers belong to."""
    return {
        "machine": platform.machine(),
        "system": platform.system(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "device": str(mx.default_device()),
        "metal": mx.metal.is_available(),
        "python": platform.python_version(),
        **{name: _version(name) for name in ("mlx", "numpy", "torch", "mlx_gradscale")},
    }


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            names = [x.split(":", 1)[1] for x in file if x.startswith("model name")]
        return names[0].strip()
    except (OSError, IndexError):
        return platform.processor()


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def tables(rows: list[Row], figures: list[Figure]) -> str:
    """The rows and the figures of a section."""
    found = [table(rows)] if rows else []
    return "\n\n".join(found + ([figure_table(figures)] if figures else []))


def table(rows: list[Row]) -> str:
    """Rows as a Markdown table, which is one on the screen too."""
    lines = [
        "| section | case | variant | median ms | best ms | ratio | quartiles |",
        "|---|---|---|---:|---:|---:|---:|",
    ]
    lines += [
        f"| {r.section} | {r.case} | {r.variant} | {r.milliseconds:.2f} | {r.best:.2f} "
        f"| {r.ratio:.2f} | {r.low:.2f}-{r.high:.2f} |"
        for r in rows
    ]
    return "\n".join(lines)


def figure_table(figures: list[Figure]) -> str:
    """Figures as a Markdown table, with their bars."""
    words = {None: "", True: "met", False: "missed"}
    lines = ["| figure | value | at most | | note |", "|---|---:|---:|---|---|"]
    lines += [
        f"| {f.name} | {f.value:.3g}{' ' + f.unit if f.unit else ''} "
        f"| {'' if f.bar is None else f'{f.bar:g}'} | {words[f.met]} | {f.note} |"
        for f in figures
    ]
    return "\n".join(lines)


def as_json(rows: list[Row], figures: list[Figure]) -> str:
    """Everything, to compare two machines or two versions."""
    return json.dumps(
        {
            "environment": environment(),
            "rows": [asdict(r) for r in rows],
            "figures": [asdict(f) | {"met": f.met} for f in figures],
        },
        indent=1,
    )
