"""What it costs: the same work with and without the scaler, AdamW."""

from collections.abc import Iterator

import mlx.core as mx

from . import trees, variants, whole_step
from .comparison import Makers, compare
from .rows import Figure, Row, Section, rows_of
from .timing import interleave
from .trees import Shapes
from .variants import OPTIMIZERS

FLOAT32 = "float32 model"
MASTERS = "float16 model, float32 masters"
CLIPPED = ", clipped"
LORA = "448 leaves, as LoRA has"
TRANSFORMER = "a transformer's leaves"
SKIPPED = "a skipped step, against an applied one"

# Each kind of masters is a row: its name and what LossScaleOptimizer is given.
KINDS_OF_MASTERS: dict[str, dict] = {
    "LossScaleOptimizer": {},
    "masters=remainder": {"masters": "remainder"},
}

_MAKE = OPTIMIZERS["AdamW"]


def measure(rounds: int, shapes: Shapes | None = None) -> Section:
    """Measure every case, with ``shapes`` in the place of the large trees."""
    rows = whole_step.measure(rounds, *((128, 2) if shapes is None else (32, 1)))
    for case, makers in cases(shapes):
        rows += compare(case, makers, rounds)
    rows += skipped(rounds, shapes or trees.shapes_of(trees.MAIN))
    return Section(rows, figures(Section(rows)))


def cases(shapes: Shapes | None = None) -> Iterator[tuple[str, Makers]]:
    """Every case of the optimizer phase; the first of each is without a scaler."""
    main = shapes or trees.shapes_of(trees.MAIN)
    yield FLOAT32, float32_ways(main)
    yield FLOAT32 + CLIPPED, clipped_ways(main)
    yield MASTERS, masters_ways(main, clip=False)
    yield MASTERS + CLIPPED, masters_ways(main, clip=True)
    yield LORA, float32_ways(shapes or trees.shapes_of(trees.LORA))
    yield TRANSFORMER, float32_ways(shapes or trees.shapes_of(trees.TRANSFORMER))


def float32_ways(shapes: Shapes) -> Makers:
    """A float32 model, whose gradients are scaled or made true first."""
    return {
        "bare": lambda: variants.bare(_MAKE, shapes),
        "LossScaleOptimizer": lambda: variants.loss_scale_optimizer(
            _MAKE, shapes, true=True
        ),
        "with scaled gradients": lambda: variants.loss_scale_optimizer(_MAKE, shapes),
        "GradScaler, scaled": lambda: variants.scaler(_MAKE, shapes),
    }


def clipped_ways(shapes: Shapes) -> Makers:
    """The same behind MLX's clip_grad_norm, and with the package's own clipping."""
    return {
        "bare + clip_grad_norm": lambda: variants.bare_clipped(_MAKE, shapes),
        "LossScaleOptimizer": lambda: variants.loss_scale_optimizer(
            _MAKE, shapes, clip=True, true=True
        ),
        "with scaled gradients": lambda: variants.loss_scale_optimizer(
            _MAKE, shapes, clip=True
        ),
    }


def masters_ways(shapes: Shapes, clip: bool) -> Makers:
    """A float16 model: every kind of masters, with true and with scaled gradients."""
    ways: Makers = {
        "bare on masters + cast": lambda: variants.bare_masters(
            _MAKE, shapes, clip=clip
        )
    }
    half = {"dtype": mx.float16, "model_dtype": mx.float16, "clip": clip}
    for name, options in KINDS_OF_MASTERS.items():
        ways[name] = lambda options=options: variants.loss_scale_optimizer(
            _MAKE, shapes, true=True, options=options, **half
        )
        default = name == "LossScaleOptimizer"
        scaled = "with scaled gradients" if default else f"{name}, scaled"
        ways[scaled] = lambda options=options: variants.loss_scale_optimizer(
            _MAKE, shapes, options=options, **half
        )
    return ways


def skipped(rounds: int, shapes: Shapes) -> list[Row]:
    """A step that is skipped against one that is applied."""
    phase = variants.scaler(_MAKE, shapes)
    good, bad = phase.gradients, trees.with_inf(phase.gradients)

    def run(gradients):
        phase.gradients = gradients
        phase.run()

    runs = {"applied": lambda: run(good), "skipped": lambda: run(bad)}
    return rows_of(SKIPPED, interleave(runs, rounds))


def figures(section: Section) -> list[Figure]:
    """The figures that have a bar."""
    scaled, wrapper = "GradScaler, scaled", "LossScaleOptimizer"
    found = [
        Figure("optimizer phase / bare", section.row(FLOAT32, scaled).ratio, bar=1.20),
        Figure("LoRA-like tree / bare", section.row(LORA, scaled).ratio, bar=1.25),
        Figure(
            "masters / bare on masters + cast",
            section.row(MASTERS, wrapper).ratio,
            bar=1.35,
            note="float16 model, true gradients",
        ),
    ]
    for case in (whole_step.FLOAT32, whole_step.FLOAT16):
        ratio = section.row(case, whole_step.SCALED).ratio
        found.append(Figure(f"{case} / without", ratio, bar=1.02))
    return found
