"""How much slower is the optimizer phase with loss scaling?

Each variant is one compiled step from gradients to new parameters and optimizer state:
"scaled" with this package, and "bare" with MLX's optimizer alone. A bare AdamW step in
float32 reads four arrays and writes three. A scaler has to read each gradient once more
before anything is written, so the best possible ratio for this step is 8/7 = 1.14. An
eager step of MLX's optimizer runs one kernel per operation; ours compiles the update.
"""

from . import steps
from .harness import Rows, release_memory, take_turns
from .steps import CASES

SIZES = (8, 64, 256)
EAGER = ("AdamW, float32", "AdamW, float16, float32 master weights")


def measure(quick: bool = False) -> Rows:
    """Time every case at 8 M parameters; a full run adds 64 M and 256 M."""
    compiled = [
        _compare(name, millions, quick)
        for millions in (SIZES[:1] if quick else SIZES)
        for name in CASES
    ]
    return compiled + [_compare(name, SIZES[0], quick, False) for name in EAGER]


def _compare(
    name: str, millions: int, quick: bool, compiled: bool = True
) -> dict[str, object]:
    release_memory()
    case = CASES[name]
    gradients = case.gradients(steps.shapes_of(millions))
    runs = {
        "bare": steps.bare_step(case, gradients, compiled).run,
        "scaled": steps.scaled_step(case, gradients, compiled).run,
    }
    rounds = 5 if quick else 12 if millions == 8 else 6
    seconds = take_turns(runs, rounds, warm_up=2)
    return {
        "case": name if compiled else f"{name}, eager",
        "parameters": f"{millions} M",
        "bare ms": round(1e3 * seconds["bare"], 1),
        "scaled ms": round(1e3 * seconds["scaled"], 1),
        "ratio": round(seconds["scaled"] / seconds["bare"], 2),
    }
