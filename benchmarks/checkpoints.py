"""How fast are PyTorch checkpoints read and written, and how much memory is needed?

The checkpoint has 1.5 GiB (64 MiB with --quick); half of its tensors are float32 and
half bfloat16. This package and PyTorch take turns in one process. Memory is the peak
during a call minus the memory in use before, divided by the size of the file. This
package syncs each file to disk, and torch.save does not, so it is also timed with a
sync. This package also checks the CRC-32 of the data it loads.

``python -m benchmarks.checkpoints load|save FOLDER SIZE ROUNDS`` measures one action.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from .harness import NO_TORCH, Rows, lower_quartile

_HAS_STATUS = Path("/proc/self/clear_refs").exists()


def measure(quick: bool = False) -> Rows:
    """Measure all contenders; without PyTorch, return only a note."""
    if find_spec("torch") is None:
        return NO_TORCH
    size, rounds = (2**26, 3) if quick else (3 * 2**29, 9)
    rows: Rows = []
    with tempfile.TemporaryDirectory() as folder:
        for action in ("load", "save"):
            command = [sys.executable, "-m", "benchmarks.checkpoints", action, folder]
            command += [str(size), str(rounds)]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE)
            rows += json.loads(done.stdout)
    return rows


def main() -> None:
    """Measure one action in this process, and print its rows as JSON."""
    action, folder, size, rounds = sys.argv[1:]
    path = Path(folder) / "run.pt"
    if action == "load":
        _make_checkpoint(path, int(size))
    runs = _loaders(path) if action == "load" else _savers(path)
    found: dict[str, list[tuple[float, int]]] = {name: [] for name in runs}
    for _ in range(int(rounds)):
        for name, run in runs.items():
            found[name].append(_measure(run))
    seconds = {
        name: lower_quartile([s for s, _ in rows]) for name, rows in found.items()
    }
    rows = [
        {
            "action": action,
            "by": name,
            "s": round(seconds[name], 3),
            "of torch": round(seconds[name] / seconds["torch"], 2),
            # Later calls reuse the memory of the first.
            "peak / size": round(
                max(grown for _, grown in found[name]) / path.stat().st_size, 2
            ),
        }
        for name in runs
    ]
    print(json.dumps(rows))


def _make_checkpoint(path: Path, size: int) -> None:
    import torch

    state: dict[str, Any] = {}
    total = 0
    while total < size:
        dtype = (torch.float32, torch.bfloat16)[len(state) % 4 < 2]
        for name, shape in (("attn", (4, 1024, 1024)), ("norm", (1024,))):
            tensor = torch.empty(shape).uniform_(-1, 1).to(dtype)
            state[f"layers.{len(state)}.{name}.weight"] = tensor
            total += tensor.nbytes
    torch.save({"model": state, "epoch": 3}, path)


def _loaders(path: Path) -> dict[str, Callable[[], Any]]:
    import mlx.core as mx
    import torch

    from mlx_gradscale import torch_checkpoint

    mx.eval(mx.zeros(1))  # starts MLX's threads
    return {
        "torch": lambda: torch.load(path, weights_only=True),
        "mlx_gradscale": lambda: torch_checkpoint.load(path),
        "checksum alone": lambda: zlib.crc32(path.read_bytes()),
    }


def _savers(path: Path) -> dict[str, Callable[[], Any]]:
    import torch

    from mlx_gradscale import torch_checkpoint

    theirs, ours = torch.load(path, weights_only=True), torch_checkpoint.load(path)
    target = path.with_name("out.pt")

    def save_and_sync() -> None:
        torch.save(theirs, target)
        with open(target, "rb+") as file:
            os.fsync(file.fileno())

    return {
        "torch": lambda: torch.save(theirs, target),
        "torch and fsync": save_and_sync,
        "mlx_gradscale": lambda: torch_checkpoint.save(target, ours),
    }


def _measure(call: Callable[[], Any]) -> tuple[float, int]:
    """Return the seconds of a call and the bytes by which it raised the peak."""
    before, start = _reset_peak(), time.perf_counter()
    kept = call()
    seconds = time.perf_counter() - start
    grown = _status("VmHWM") - before if _HAS_STATUS else _rusage_peak() - before
    del kept
    return seconds, grown


def _reset_peak() -> int:
    """Reset the peak if the system supports it, and return the memory in use."""
    if not _HAS_STATUS:
        return _rusage_peak()
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _status(field: str) -> int:
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.partition(f"{field}:")[2].split()[0])


def _rusage_peak() -> int:
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes on macOS


if __name__ == "__main__":
    main()
