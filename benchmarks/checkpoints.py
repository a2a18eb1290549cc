"""How fast are PyTorch checkpoints read and written, and how much memory is needed?

The checkpoint has 1 GB (64 MB with --quick); half of its tensors are float32 and half
bfloat16. This package and PyTorch take turns, each call in a process of its own. Memory
is the peak during the call minus the memory in use before, divided by the size of the
tensors. This package syncs each file to disk, and torch.save does not, so it is also
timed with a sync. This package also checks the CRC-32 of the data it loads.

``python -m benchmarks.checkpoints CONTENDER SOURCE TARGET`` measures one call.
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

MAKE = "make"
_HAS_STATUS = Path("/proc/self/clear_refs").exists()
CONTENDERS = {
    "load": ("torch", "mlx_gradscale", "checksum alone"),
    "save": ("torch", "torch and fsync", "mlx_gradscale"),
}


def measure(quick: bool = False) -> Rows:
    """Measure all contenders; without PyTorch, return only a note."""
    if find_spec("torch") is None:
        return NO_TORCH
    size, rounds = (64e6, 3) if quick else (1e9, 5)
    found: dict[tuple[str, str], list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder) / "run.pt", Path(folder) / "out.pt"
        total = _in_a_process(MAKE, str(source), str(size))["bytes"]
        for _ in range(rounds):
            for action, names in CONTENDERS.items():
                for name in names:
                    done = _in_a_process(f"{action} {name}", str(source), str(target))
                    found.setdefault((action, name), []).append(done)
                    target.unlink(missing_ok=True)
    seconds = {
        key: lower_quartile([each["seconds"] for each in values])
        for key, values in found.items()
    }
    return [
        {
            "action": action,
            "by": name,
            "s": round(seconds[action, name], 3),
            "of torch": round(seconds[action, name] / seconds[action, "torch"], 2),
            "peak / size": round(max(each["bytes"] for each in values) / total, 2),
        }
        for (action, name), values in found.items()
    ]


def _in_a_process(*arguments: str) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.checkpoints", *arguments]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE)
    result: dict[str, float] = json.loads(done.stdout)
    return result


def main() -> None:
    """Run one contender in this process, and print its time and memory as JSON."""
    contender, source, target = sys.argv[1:]
    action, _, by = contender.partition(" ")
    if action == MAKE:
        result = {"bytes": make_checkpoint(source, float(target))}
    elif by == "checksum alone":
        data = Path(source).read_bytes()
        result = _measure(lambda: zlib.crc32(data))
    elif by == "mlx_gradscale":
        result = _measure_ours(action, source, target)
    else:
        result = _measure_torch(action, source, target, sync=by.endswith("fsync"))
    print(json.dumps(result))


def make_checkpoint(path: str, size: float) -> int:
    """Write a checkpoint with at least ``size`` bytes of tensors; return their size."""
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
    return total


def _measure_ours(action: str, source: str, target: str) -> dict[str, float]:
    import mlx.core as mx

    from mlx_gradscale import torch_checkpoint

    mx.eval(mx.zeros(1))  # starts MLX's threads
    if action == "load":
        return _measure(lambda: torch_checkpoint.load(source))
    state = torch_checkpoint.load(source)
    return _measure(lambda: torch_checkpoint.save(target, state))


def _measure_torch(
    action: str, source: str, target: str, sync: bool
) -> dict[str, float]:
    import torch

    if action == "load":
        return _measure(lambda: torch.load(source, weights_only=True))
    state = torch.load(source, weights_only=True)

    def save() -> None:
        torch.save(state, target)
        if sync:
            with open(target, "rb+") as file:
                os.fsync(file.fileno())

    return _measure(save)


def _measure(call: Callable[[], Any]) -> dict[str, float]:
    before, start = _reset_peak(), time.perf_counter()
    kept = call()
    seconds = time.perf_counter() - start
    grown = _status("VmHWM") - before if _HAS_STATUS else _rusage_peak() - before
    del kept
    return {"seconds": seconds, "bytes": grown}


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
