"""How many bytes does a step move on a GPU, and how many kernels does it launch?

Both should dominate the time there. They are counted while MLX pretends to have a GPU,
for the compiled step without the backward pass.
"""

from tools import as_on_gpu

from . import steps
from .harness import Rows, release_memory
from .steps import CASES, Step

NO_GPU: Rows = [
    {"note": "To count, run: python -m tools.as_on_gpu -m benchmarks bytes_and_kernels"}
]


def measure(quick: bool = False) -> Rows:
    """Count bytes and kernels for every case, with 32 leaves of 1 M parameters each."""
    if not as_on_gpu.is_active():
        return NO_GPU
    shapes = [(1024, 1024)] * 32
    rows = []
    for name, case in CASES.items():
        release_memory()
        gradients = case.gradients(shapes)
        bare_bytes, bare_kernels = count(steps.bare_step(case, gradients))
        moved, kernels = count(steps.scaled_step(case, gradients))
        size = steps.parameter_count(shapes)
        rows.append(
            {
                "case": name,
                "bare B/parameter": round(bare_bytes / size, 1),
                "scaled B/parameter": round(moved / size, 1),
                "bare kernels": bare_kernels,
                "scaled kernels": kernels,
            }
        )
    return rows


def count(step: Step) -> tuple[int, int]:
    """Return the bytes that one step reads and writes, and its kernel launches."""
    step.run()  # the first step initializes the optimizer
    with as_on_gpu.record() as launches:
        step.run()
    return sum(x.bytes for x in launches), sum(x.count for x in launches)
