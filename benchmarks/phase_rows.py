"""Rows of the optimizer phase: gradients in, new parameters and state out."""

import gc
from collections.abc import Callable, Iterator

import mlx.core as mx

from . import trees, variants
from .rows import Figure, Row, rows_of
from .timing import interleave
from .trees import Shapes
from .variants import OPTIMIZERS, Phase

SECTION = "optimizer phase"


def compare(case: str, makers: dict[str, Callable[[], Phase]], rounds: int) -> list:
    """Time phases against the first one; they are freed afterwards."""
    phases = {name: make() for name, make in makers.items()}
    runs = {name: phase.run for name, phase in phases.items()}
    found = rows_of(SECTION, case, interleave(runs, rounds))
    del phases, runs
    gc.collect()
    mx.clear_cache()
    return found


def every_way(name: str, shapes: Shapes, dtype: mx.Dtype) -> dict[str, Callable]:
    """All the ways to do a step with one optimizer."""
    make = OPTIMIZERS[name]
    return {
        "bare compiled": lambda: variants.bare(make, shapes, dtype),
        "scaler compiled": lambda: variants.scaler(make, shapes, dtype),
        "bare eager": lambda: variants.bare(make, shapes, dtype, compiled=False),
        "scaler eager": lambda: variants.scaler(make, shapes, dtype, compiled=False),
        "by hand, eager": lambda: variants.by_hand(make, shapes, dtype),
        "plain where, compiled": lambda: variants.plain_where(make, shapes, dtype),
    }


def only_compiled(ways: dict[str, Callable]) -> dict[str, Callable]:
    """The two that a bar is about."""
    return {name: ways[name] for name in ("bare compiled", "scaler compiled")}


def masters_and_clipping(shapes: Shapes) -> Iterator[tuple[str, dict[str, Callable]]]:
    """LossScaleOptimizer against the same work without scaling, by case."""
    make = OPTIMIZERS["AdamW"]
    half = {"dtype": mx.float16, "model_dtype": mx.float16}
    yield (
        "AdamW, float32, clipped",
        {
            "bare + clip_grad_norm": lambda: variants.bare_clipped(make, shapes),
            "LossScaleOptimizer": lambda: variants.loss_scale_optimizer(
                make, shapes, clip=True
            ),
        },
    )
    for case, clip in (("masters", False), ("masters, clipped", True)):
        ways = {
            "bare on masters + cast": lambda clip=clip: variants.bare_masters(
                make, shapes, clip=clip
            ),
            "LossScaleOptimizer": lambda clip=clip: variants.loss_scale_optimizer(
                make, shapes, clip=clip, true=True, **half
            ),
            "with scaled gradients": lambda clip=clip: variants.loss_scale_optimizer(
                make, shapes, clip=clip, **half
            ),
        }
        if not clip:
            ways["bare, gradients left in float16"] = lambda: variants.bare_masters(
                make, shapes, cast=False
            )
        yield f"AdamW, float16 model, {case}", ways


def quick(rounds: int) -> tuple[list[Row], list[Figure]]:
    """All ways to do a step, on a quarter of the main tree."""
    shapes = trees.shapes_of(trees.MAIN)[:8]
    ways = every_way("AdamW", shapes, mx.float32)
    return compare("AdamW, float32, 2 M in 8 leaves", ways, rounds), []


def measure(rounds: int) -> tuple[list[Row], list[Figure]]:
    """Measure all cases of the optimizer phase."""
    shapes = trees.shapes_of(trees.MAIN)
    few = max(rounds // 2, 5)
    found = []
    for name in ("AdamW", "Adam", "SGD", "Lion", "Adafactor"):
        for dtype, label in ((mx.float32, "float32"), (mx.float16, "float16")):
            ways = every_way(name, shapes, dtype)
            if name != "AdamW":
                ways = only_compiled(ways)
            case = f"{name}, {label}, {trees.MAIN}"
            found += compare(case, ways, rounds if name == "AdamW" else few)
    # Muon is matmuls: 8 M would take a minute per step on a reference BLAS.
    ways = only_compiled(every_way("Muon", [(128, 128)] * 6, mx.float32))
    found += compare("Muon, float32, 6 of 128x128", ways, few)
    for case, makers in masters_and_clipping(shapes):
        found += compare(f"{case}, {trees.MAIN}", makers, rounds)
    for name in (trees.LORA, *trees.OTHERS):
        ways = every_way("AdamW", trees.shapes_of(name), mx.float32)
        if name != trees.LORA:
            ways = only_compiled(ways)
        case = f"AdamW, float32, {name}"
        found += compare(case, ways, rounds if name == trees.LORA else few)
    return found, figures(found)


def skipped(rounds: int, shapes: Shapes) -> list[Row]:
    """A step that is skipped against one that is applied."""
    phase = variants.scaler(OPTIMIZERS["AdamW"], shapes)
    good, bad = phase.gradients, trees.with_inf(phase.gradients)

    def run(gradients):
        phase.gradients = gradients
        phase.run()

    runs = {"applied": lambda: run(good), "skipped": lambda: run(bad)}
    case = f"AdamW, {len(shapes)} leaves"
    return rows_of("skipped steps", case, interleave(runs, rounds))


def figures(rows: list[Row]) -> list[Figure]:
    """The figures that have a bar, from the rows of the full suite."""
    by_name = {(row.case, row.variant): row for row in rows}
    main = next(row.case for row in rows)
    ours = by_name[main, "scaler compiled"]
    lora = by_name[f"AdamW, float32, {trees.LORA}", "scaler compiled"]
    eager, bare = by_name[main, "scaler eager"], by_name[main, "bare eager"]
    floor = ours.milliseconds / bare.milliseconds
    masters = f"AdamW, float16 model, masters, {trees.MAIN}"
    return [
        Figure("optimizer phase / bare compiled", ours.ratio, bar=1.20, note=main),
        Figure("LoRA-like tree / bare compiled", lora.ratio, bar=1.25),
        Figure(
            "masters / bare on masters + cast",
            by_name[masters, "LossScaleOptimizer"].ratio,
            bar=1.35,
            note="float16 model",
        ),
        Figure(
            "eager loop / bare eager",
            eager.milliseconds / bare.milliseconds,
            bar=0.55,
            note=f"the compiled step is {floor:.2f} of bare eager",
        ),
    ]
