"""How the cost grows: with the number of parameters, and with that of leaves."""

import gc
from collections.abc import Callable

import mlx.core as mx

from . import variants
from .rows import Figure, Row, rows_of
from .timing import Timing, interleave, slope
from .variants import OPTIMIZERS

MILLIONS = (1, 4, 16, 64, 256)
LEAVES = (10, 50, 250, 1000, 5000)


def with_parameters(rounds: int, most: int) -> tuple[list[Row], list[Figure]]:
    """Grow the tree in leaves of 1 M. SGD with momentum, so that 256 M fit in 5 GB.

    One variant after the other at 256 M: both at once are 10 GB.
    """
    sizes = [m for m in MILLIONS if m <= most]
    rows: list[Row] = []
    for millions in sizes:
        shapes = [(1000, 1000)] * millions
        few = max(3, rounds // millions) if millions > 4 else rounds
        rows += _pair(
            "growth, parameters", f"{millions} M", "SGD", shapes, few, millions < 100
        )
    return rows, _slopes(rows, sizes, "ms per M parameters", 1.0)


def with_leaves(rounds: int, most: int) -> tuple[list[Row], list[Figure]]:
    """Grow the number of leaves, each of 64 values."""
    numbers = [n for n in LEAVES if n <= most]
    rows: list[Row] = []
    for n in numbers:
        few = rounds if n <= 1000 else max(3, rounds // 3)
        rows += _pair("growth, leaves", f"{n} leaves", "AdamW", [(64,)] * n, few, True)
    return rows, _slopes(rows, numbers, "us per leaf", 1e3)


def _pair(
    section: str, case: str, name: str, shapes: list, rounds: int, together: bool
) -> list[Row]:
    makers: dict[str, Callable] = {
        "bare compiled": lambda: variants.bare(OPTIMIZERS[name], shapes),
        "scaler compiled": lambda: variants.scaler(OPTIMIZERS[name], shapes),
    }
    seconds = {}
    if together:
        phases = {key: make() for key, make in makers.items()}
        runs = {key: phase.run for key, phase in phases.items()}
        seconds = {k: t.seconds for k, t in interleave(runs, rounds).items()}
        del phases, runs
    else:
        for key, make in makers.items():
            phase = make()
            alone = interleave({key: phase.run}, rounds, warm_up=2)
            seconds[key] = alone[key].seconds
            del phase
            _free()
    _free()
    base = seconds["bare compiled"]
    return rows_of(section, case, {k: Timing(s, base) for k, s in seconds.items()})


def _slopes(
    rows: list[Row], amounts: list[int], unit: str, factor: float
) -> list[Figure]:
    found = []
    for variant in ("bare compiled", "scaler compiled"):
        times = [r.best * factor for r in rows if r.variant == variant]
        per_unit, r_squared = slope([float(a) for a in amounts], times)
        found.append(
            Figure(f"{variant}: slope", per_unit, unit, note=f"R2 {r_squared:.3f}")
        )
    return found


def _free() -> None:
    gc.collect()
    mx.clear_cache()
