"""Load and save a 1 GB checkpoint, against torch.load and torch.save in the same run.

    python benchmarks/torch_checkpoint_speed.py --gigabytes 1 --rounds 5

Every measurement is a process of its own, and the contenders take turns, so that a
noisy machine is noisy for all. Time is that of the one call, on the clock and of all
processors together; memory is by how much the process's peak grew in it. ``save`` here
writes atomically and syncs to the disk, which ``torch.save`` does not: that is measured
bare and with the same sync.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

CONTENDERS = (
    "load: mlx_gradscale",
    "load: torch",
    "save: mlx_gradscale",
    "save: torch",
    "save: torch + fsync",
)


def peak_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def measure(call: Callable[[], Any]) -> None:
    before, cpu, start = peak_bytes(), time.process_time(), time.perf_counter()
    kept = call()
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    grown = peak_bytes() - before
    print(json.dumps({"seconds": seconds, "cpu": cpu, "bytes": grown}))
    del kept


def run_one(contender: str, source: str, target: str) -> None:
    """In the process of its own."""
    if "torch" in contender:
        import os

        import torch

        def save_synced() -> None:
            torch.save(state, target)
            with open(target, "rb+") as file:
                os.fsync(file.fileno())

        if contender.startswith("load"):
            return measure(lambda: torch.load(source, weights_only=True))
        state = torch.load(source, weights_only=True)
        return measure(
            save_synced if "fsync" in contender else lambda: torch.save(state, target)
        )
    import mlx.core as mx

    from mlx_gradscale import torch_checkpoint

    mx.eval(mx.zeros((1,), stream=mx.cpu))  # the stream's thread
    if contender.startswith("load"):
        return measure(lambda: torch_checkpoint.load(source))
    state = torch_checkpoint.load(source)
    return measure(lambda: torch_checkpoint.save(target, state))


def make_checkpoint(path: str, size: float) -> None:
    """Half float32, half bfloat16, in layers of a transformer's proportions."""
    import torch

    width = 2048
    state: dict[str, Any] = {}
    total = 0
    while total < size:
        layer = len(state)
        for name, shape in (("attn", (4, width, width)), ("norm", (width,))):
            dtype = (torch.float32, torch.bfloat16)[layer % 4 < 2]
            tensor = torch.empty(shape).uniform_(-1, 1).to(dtype)
            state[f"layers.{layer}.{name}.weight"] = tensor
            total += tensor.nbytes
    torch.save({"model": state, "epoch": 3}, path)
    print(total)


def _run(*arguments: str) -> bytes:
    command = [sys.executable, __file__, *arguments]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", help="where to write; a temporary one if not given")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--make", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        return run_one(*args.one)
    if args.make:
        return make_checkpoint(args.make, args.gigabytes * 1e9)
    results: dict[str, list[dict[str, float]]] = {name: [] for name in CONTENDERS}
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        source = str(Path(folder) / "run.pt")
        # In a process of its own too: a child's peak begins at its parent's.
        size = int(_run("--make", source, "--gigabytes", str(args.gigabytes)))
        for _ in range(args.rounds):
            for i, name in enumerate(CONTENDERS):
                # Written anew each time by each, to a file of its own.
                target = str(Path(folder) / f"out_{i}.pt")
                results[name].append(json.loads(_run("--one", name, source, target)))
                Path(target).unlink(missing_ok=True)
    print(f"{size / 1e9:.2f} GB of tensors, {args.rounds} rounds\n")
    print(f"{'':<22}{'best s':>8}{'median s':>10}{'cpu s':>8}{'peak / tensors':>16}")
    for name, rounds in results.items():
        times = [one["seconds"] for one in rounds]
        best, median = min(times), statistics.median(times)
        cpu = statistics.median(one["cpu"] for one in rounds)
        peak = max(one["bytes"] for one in rounds) / size
        print(f"{name:<22}{best:>8.2f}{median:>10.2f}{cpu:>8.2f}{peak:>16.3f}")


if __name__ == "__main__":
    main()
