"""Against what people write: all the ways to do a step, by hand and by the package."""

from collections.abc import Callable

import mlx.core as mx

from . import trees, variants
from .comparison import Makers, compare
from .rows import Figure, Row, Section
from .trees import Shapes
from .variants import OPTIMIZERS

FLOAT32 = "float32 gradients"
FLOAT16 = "float16 gradients"
LORA = "448 leaves, as LoRA has"
MASTERS = "float16 model, float32 masters"

_MAKE = OPTIMIZERS["AdamW"]


def measure(rounds: int, shapes: Shapes | None = None) -> Section:
    """Measure every case, with ``shapes`` in the place of the large trees."""
    main = shapes or trees.shapes_of(trees.MAIN)
    lora = shapes or trees.shapes_of(trees.LORA)
    rows: list[Row] = [
        *compare(FLOAT32, every_way(_MAKE, main, mx.float32), rounds),
        *compare(FLOAT16, every_way(_MAKE, main, mx.float16), max(rounds // 2, 3)),
        *compare(LORA, every_way(_MAKE, lora, mx.float32), rounds),
        *compare(MASTERS, masters_ways(main), max(rounds // 2, 3)),
    ]
    return Section(rows, figures(Section(rows)))


def every_way(make: Callable, shapes: Shapes, dtype: mx.Dtype) -> Makers:
    """All the ways to do a step with one optimizer."""
    return {
        "bare, compiled": lambda: variants.bare(make, shapes, dtype),
        "GradScaler, compiled": lambda: variants.scaler(make, shapes, dtype),
        "a where on every output": lambda: variants.plain_where(make, shapes, dtype),
        "bare, eager": lambda: variants.bare(make, shapes, dtype, compiled=False),
        "GradScaler, eager": lambda: variants.scaler(
            make, shapes, dtype, compiled=False
        ),
        ".item() per leaf, eager": lambda: variants.by_hand(make, shapes, dtype),
    }


def masters_ways(shapes: Shapes) -> Makers:
    """Masters kept by hand, with and without the cast that people forget."""
    half = {"dtype": mx.float16, "model_dtype": mx.float16}
    return {
        "bare on masters + cast": lambda: variants.bare_masters(_MAKE, shapes),
        "LossScaleOptimizer": lambda: variants.loss_scale_optimizer(
            _MAKE, shapes, true=True, **half
        ),
        "gradients left float16": lambda: variants.bare_masters(
            _MAKE, shapes, cast=False
        ),
    }


def figures(section: Section) -> list[Figure]:
    """The eager loop, which the scaler compiles by itself."""
    eager = section.row(FLOAT32, "GradScaler, eager")
    bare = section.row(FLOAT32, "bare, eager")
    compiled = section.row(FLOAT32, "bare, compiled")
    limit = compiled.milliseconds / bare.milliseconds
    return [
        Figure(
            "eager loop / bare eager",
            eager.milliseconds / bare.milliseconds,
            bar=0.55,
            note=f"the bare compiled step is {limit:.2f} of the bare eager one",
        )
    ]
