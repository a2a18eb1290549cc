"""How much slower is the optimizer phase with loss scaling, without mx.compile?

The steps are the same as in optimizer_phase, but not compiled, so MLX's optimizers run
one kernel per operation. This package compiles the update itself, so a step with loss
scaling can be faster than a bare step.
"""

from . import steps
from .harness import Rows, release_memory, take_turns

NAMES = (
    "AdamW, float32",
    "AdamW, float32, max_grad_norm",
    "AdamW, float16, float32 master weights",
)


def measure(quick: bool = False) -> Rows:
    """Time uncompiled steps with 8 M parameters."""
    return [_compare(name, quick) for name in NAMES]


def _compare(name: str, quick: bool) -> dict[str, object]:
    release_memory()
    case = steps.CASES[name]
    gradients = case.gradients(steps.shapes_of(8))
    runs = {
        "bare": steps.bare_step(case, gradients, compiled=False).run,
        "scaled": steps.scaled_step(case, gradients, compiled=False).run,
    }
    seconds = take_turns(runs, rounds=5 if quick else 12)
    return {
        "case": name,
        "bare ms": round(1e3 * seconds["bare"], 1),
        "scaled ms": round(1e3 * seconds["scaled"], 1),
        "ratio": round(seconds["scaled"] / seconds["bare"], 2),
    }
