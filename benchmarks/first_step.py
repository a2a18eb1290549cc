"""How long does the first step take?

The first step traces, compiles and runs AdamW; "scaled" is GradScaler.apply_gradients.
Thousands of leaves of 64 values show the cost per leaf; 8 leaves show the cost of
compiling kernels. Each step runs in a process of its own: one starts with an empty
kernel cache, and three reuse its kernels. (MLX's CPU backend caches kernels in the
temporary folder. Metal has its own cache, which is not emptied.)

``python -m benchmarks.first_step VARIANT LEAVES`` times one step.
"""

import os
import subprocess
import sys
import tempfile
import time

import mlx.core as mx

from . import steps
from .harness import Rows, lower_quartile

VARIANTS = {
    "bare": steps.bare_tree_step,
    "scaled": steps.scaled_tree_step,
}


def measure(quick: bool = False) -> Rows:
    """Time the first step of AdamW, bare and with ``GradScaler.apply_gradients``."""
    rows = []
    for leaves in (1000,) if quick else (8, 5000):
        seconds = _seconds(leaves, rounds=1 if quick else 3)
        for cache in ("empty", "filled"):
            bare, scaled = (seconds[variant, cache] for variant in VARIANTS)
            rows.append(
                {
                    "leaves": leaves,
                    "kernel cache": cache,
                    "bare s": round(bare, 2),
                    "scaled s": round(scaled, 2),
                    "ratio": round(scaled / bare, 2),
                }
            )
    return rows


def _seconds(leaves: int, rounds: int) -> dict[tuple[str, str], float]:
    found: dict[tuple[str, str], list[float]] = {}
    for _ in range(rounds):
        for variant in VARIANTS:
            with tempfile.TemporaryDirectory() as folder:
                for cache in ("empty", "filled", "filled", "filled"):
                    seconds = _in_a_process(variant, leaves, folder)
                    found.setdefault((variant, cache), []).append(seconds)
    return {key: lower_quartile(values) for key, values in found.items()}


def _in_a_process(variant: str, leaves: int, folder: str) -> float:
    command = [sys.executable, "-m", "benchmarks.first_step", variant, str(leaves)]
    environment = os.environ | {"TMPDIR": folder}
    done = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, text=True, check=True
    )
    return float(done.stdout)


def main() -> None:
    """Time a first step in this process, and print the seconds."""
    variant, leaves = sys.argv[1], int(sys.argv[2])
    arrays = [mx.random.normal((64,)) for _ in range(leaves)]
    gradients = {f"layer{i}": {"weight": x} for i, x in enumerate(arrays)}
    step = VARIANTS[variant](gradients)
    start = time.perf_counter()
    step.run()
    print(time.perf_counter() - start)


if __name__ == "__main__":
    main()
