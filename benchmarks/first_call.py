"""The first call: trace, compile, run; each in a process with empty caches.

Run as ``python -m benchmarks.first_call bare|scaler LEAVES`` it prints seconds.
"""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from .comparison import say
from .rows import Figure, Section

# Cold, four kernels against two are needed, and the compiler takes its time for each.
_BARS = {"cold": 2.3, "warm": 1.5}


def measure(leaves: int) -> Section:
    """Time the first call of both, with an empty and with a filled kernel cache.

    MLX's CPU backend compiles a kernel with the system's C++ compiler and keeps it
    in the temporary folder; Metal keeps its own cache.
    """
    seconds: dict[tuple[str, str], float] = {}
    built = {}
    for name in ("bare", "scaler"):
        say(f"first call, {name}")
        with tempfile.TemporaryDirectory() as folder:
            for cache in ("cold", "warm"):
                seconds[name, cache] = _in_a_process(name, leaves, folder)
            built[name] = len(list(Path(folder).rglob("*.so")))
    found = []
    for cache in ("cold", "warm"):
        ours, bare = seconds["scaler", cache], seconds["bare", cache]
        note = f"{ours:.2f} s against {bare:.2f} s"
        if cache == "cold":
            note += f", {built['scaler']} kernels built against {built['bare']}"
        found.append(
            Figure(
                f"first call / bare, {cache} cache",
                ours / bare,
                bar=_BARS[cache],
                note=note,
            )
        )
    return Section(figures=found)


def _in_a_process(name: str, leaves: int, folder: str) -> float:
    command = [sys.executable, "-m", "benchmarks.first_call", name, str(leaves)]
    environment = os.environ | {"TMPDIR": folder}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=True
    )
    return float(done.stdout)


def main() -> None:
    from . import variants

    name, leaves = sys.argv[1], int(sys.argv[2])
    phase = getattr(variants, name)(variants.OPTIMIZERS["AdamW"], [(500, 500)] * leaves)
    start = time.perf_counter()
    phase.run()
    print(time.perf_counter() - start)


if __name__ == "__main__":
    main()
