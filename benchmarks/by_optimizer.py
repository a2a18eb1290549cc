"""What it costs by optimizer: every one of mlx.optimizers, compiled."""

import mlx.core as mx
from mlx.utils import tree_flatten

from . import trees, variants
from .comparison import compare
from .rows import Figure, Row, Section
from .trees import Shapes
from .variants import ELEMENTWISE, OPTIMIZERS

DTYPES = {"float32 gradients": mx.float32, "float16 gradients": mx.float16}
SCALED = "GradScaler"
# Muon is matmuls: 8 M would take a minute per step on a reference BLAS.
MUON_SHAPES: Shapes = [(128, 128)] * 6


def measure(rounds: int, shapes: Shapes | None = None) -> Section:
    """Measure every optimizer with both kinds of gradients."""
    rows: list[Row] = []
    for name, make in OPTIMIZERS.items():
        main = shapes or trees.shapes_of(trees.MAIN)
        used = MUON_SHAPES if name == "Muon" else main
        for label, dtype in DTYPES.items():
            ways = {
                "bare": lambda m=make, s=used, d=dtype: variants.bare(m, s, d),
                SCALED: lambda m=make, s=used, d=dtype: variants.scaler(m, s, d),
            }
            rows += compare(f"{name}, {label}", ways, max(rounds // 2, 3))
    return Section(rows, figures(Section(rows)))


def passes(name: str) -> int:
    """Return how often a bare elementwise update reads or writes the parameters.

    It reads the gradient, and reads and writes the parameter and each array of its
    shape in the state that a step changes: SGD has a momentum without using it. A
    scaler reads the gradient once more.
    """
    tree, optimizer = trees.make([(8, 8)]), OPTIMIZERS[name]()
    optimizer.init(tree)
    before = dict(tree_flatten(optimizer.state))
    optimizer.apply_gradients(tree, tree)
    after = tree_flatten(optimizer.state)
    return 3 + 2 * sum(x.shape == (8, 8) and x is not before[k] for k, x in after)


def limit(name: str) -> float | None:
    """Return the least ratio to bare that passes over memory allow, if known."""
    return (passes(name) + 1) / passes(name) if name in ELEMENTWISE else None


def figures(section: Section) -> list[Figure]:
    """Each optimizer's ratio with float32 gradients, against 1.3 or its limit."""
    found = []
    for name in OPTIMIZERS:
        least = limit(name)
        ratio = section.row(f"{name}, float32 gradients", SCALED).ratio
        note = f"{least:.2f} is the limit by passes" if least else ""
        bar = max(1.3, round(1.02 * least, 2)) if least else 1.3
        found.append(Figure(f"{name} / bare", ratio, bar=bar, note=note))
    return found
