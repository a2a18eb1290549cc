"""How time, first call and memory grow with parameters and with leaves."""

import os
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import mlx.core as mx

from . import variants
from .comparison import free, say
from .counting import peak_bytes
from .rows import Figure, Point, Section
from .timing import exponent, interleave
from .trees import Shapes, size
from .variants import OPTIMIZERS, Phase

PARAMETERS, LEAVES = "parameters", "leaves"
BARE, WRAPPER = "bare", "LossScaleOptimizer"
_MAKERS: dict[str, Callable] = {
    BARE: variants.bare,
    WRAPPER: variants.loss_scale_optimizer,
}
# 32 leaves that grow: 1, 8, 64 and 256 M.
_SIDES = ((125, 250), (500, 500), (1000, 2000), (2000, 4000))
# Parameters: of 256 M two variants at once would be 10 GB.
_MOST_AT_ONCE = 10**8
MEASURES: dict[str, Callable[[Point], float]] = {
    "time per step": lambda point: point.milliseconds,
    "first call": lambda point: point.first_call,
    "peak memory": lambda point: point.peak_bytes,
}


def measure(
    rounds: int,
    sides: Sequence[tuple[int, int]] = _SIDES,
    numbers: Sequence[int] = (10, 100, 1000, 10_000),
) -> Section:
    """Grow 32 leaves to 256 M parameters, and leaves of 64 values to 10,000.

    SGD with momentum for the parameters: its 256 M fit in 5.2 GB.
    """
    points = []
    for axis, optimizer, amounts in (
        (PARAMETERS, "SGD, momentum", {32 * x * y: [(x, y)] * 32 for x, y in sides}),
        (LEAVES, "AdamW", {n: [(64,)] * n for n in numbers}),
    ):
        for amount, shapes in amounts.items():
            say(f"{amount:,} {axis}")
            # The largest takes longest, and varies least.
            few = max(3, rounds // 4) if amount == max(amounts) else rounds
            points += _at(axis, amount, shapes, optimizer, few)
    return Section(points=points, figures=figures(points))


def _at(
    axis: str, amount: int, shapes: Shapes, optimizer: str, rounds: int
) -> list[Point]:
    """Measure the variants at one size, interleaved where memory allows."""
    found = []
    alone = size(shapes) > _MOST_AT_ONCE
    for names in [[name] for name in _MAKERS] if alone else [list(_MAKERS)]:
        phases, first, peaks = {}, {}, {}
        for name in names:
            before = mx.get_active_memory()
            build = partial(_MAKERS[name], OPTIMIZERS[optimizer], shapes)
            phases[name], first[name] = _first_call(build)
            peaks[name] = peak_bytes(phases[name].run, 2) - before
        timings = interleave({n: p.run for n, p in phases.items()}, rounds, warm_up=1)
        phases.clear()
        free()
        found += [
            Point(axis, amount, n, timings[n].best * 1e3, first[n] * 1e3, peaks[n])
            for n in names
        ]
    return found


def _first_call(build: Callable[[], Phase]) -> tuple[Phase, float]:
    """Trace and run, with every kernel built before: that is another question."""
    phase, seconds, compiled = _timed(build)
    if compiled:
        del phase
        free()
        phase, seconds, _ = _timed(build)
    return phase, seconds


def _timed(build: Callable[[], Phase]) -> tuple[Phase, float, bool]:
    phase, before = build(), _kernels_on_disk()
    start = time.perf_counter()
    phase.run()
    seconds = time.perf_counter() - start
    return phase, seconds, _kernels_on_disk() > before


def _kernels_on_disk() -> int:
    # Where MLX's CPU backend keeps what the C++ compiler has made for it: it looks at
    # TMPDIR each time, Python only once.
    temporary = os.environ.get("TMPDIR") or tempfile.gettempdir()
    return sum(1 for _ in Path(temporary, "mlx").rglob("*.so"))


def figures(points: list[Point]) -> list[Figure]:
    """Exponents of growth, 1 being linear, and the largest tree against bare."""
    return [
        figure
        for axis in (PARAMETERS, LEAVES)
        for what in MEASURES
        for figure in _growth_of(what, axis, points)
    ]


def _growth_of(what: str, axis: str, points: list[Point]) -> list[Figure]:
    exponents, largest = {}, {}
    for variant in (BARE, WRAPPER):
        amounts, values = curve(points, axis, variant, what)
        exponents[variant] = exponent(amounts, values)
        largest[variant] = values[-1]
    return [
        Figure(
            f"{what} by {axis}: exponent",
            exponents[WRAPPER],
            note=f"bare {exponents[BARE]:.2f}",
        ),
        Figure(
            f"{what}, {amounts[-1]:,} {axis} / bare",
            largest[WRAPPER] / largest[BARE],
            # Time has its bars elsewhere, and peak memory is counted.
            bar=1.5 if what == "first call" else None,
        ),
    ]


def curve(
    points: list[Point], axis: str, variant: str, what: str
) -> tuple[list[int], list[float]]:
    """Return the amounts along an axis, and what was measured of a variant there."""
    found = [p for p in points if (p.axis, p.variant) == (axis, variant)]
    return [p.amount for p in found], [MEASURES[what](p) for p in found]
