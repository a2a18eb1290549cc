"""How much slower is the optimizer phase in a loop that is not compiled?

The steps are the same as in optimizer_phase, without mx.compile. MLX's optimizers then
run one kernel per operation. This package still compiles the update, so its steps can
be faster than bare ones.
"""

from . import steps
from .harness import Rows, release_memory, take_turns

NAMES = (
    "AdamW, float32",
    "AdamW, float32, max_grad_norm",
    "AdamW, float16, float32 master weights",
)


def measure(quick: bool = False) -> Rows:
    """Time eager steps of 8 M parameters."""
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
