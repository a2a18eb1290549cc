"""1 GB of a run through ``mlx_gradscale.convert`` both ways, against PyTorch itself.

    python benchmarks/convert_speed.py --gigabytes 1 --rounds 5

The run is a model with AdamW's two moments, float32, in the proportions of a
transformer. PyTorch's part is ``torch.load`` and ``torch.save``: what it takes to read
such a file and write it again. Every contender is a process of its own and they take
turns; seconds are those of the whole process, its imports included, on the clock and of
all processors together; peak is the most memory that it held, as the system counted it.
Files that convert writes are synced to the disk, PyTorch's are not. Measured figures
are in docs/checkpoint_sources.md.
"""

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

_COPY = """
import sys, torch
torch.save(torch.load(sys.argv[1], weights_only=True), sys.argv[2])
"""
_MAKE = """
import sys, torch
path, size, width = sys.argv[1], float(sys.argv[2]), int(sys.argv[3])
layer = {"norm": (width,), "attn": (width, 4 * width), "mlp": (4 * width, width)}
model = torch.nn.ParameterDict()
while 12 * sum(p.numel() for p in model.values()) < size:
    for name, shape in layer.items():
        number = len(model) // len(layer)
        model[f"{number}_{name}"] = torch.nn.Parameter(torch.empty(shape).uniform_())
optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
for parameter in model.values():
    parameter.grad = parameter.data
optimizer.step()
torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
print(12 * sum(p.numel() for p in model.values()))
"""


class Cost(NamedTuple):
    """What a process took: seconds on the clock and of processors, and its peak."""

    seconds: float
    cpu: float
    peak: int


def cost(*command: str) -> Cost:
    """Run a command, and tell what it took; raise if it fails."""
    start = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - start
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    unit = 1 if sys.platform == "darwin" else 1024
    return Cost(seconds, used.ru_utime + used.ru_stime, unit * used.ru_maxrss)


def contenders(folder: Path) -> dict[str, list[str]]:
    """The commands, in the order in which they can run."""
    source, run = str(folder / "run.pt"), str(folder / "run")
    convert = [sys.executable, "-m", "mlx_gradscale", "convert", "--mlx-path", run]
    return {
        "convert to MLX": [*convert, "--torch-path", source],
        "convert to PyTorch": [*convert, "--torch-path", str(folder / "back.pt")],
        "torch.load + torch.save": [
            *(sys.executable, "-c", _COPY, source, str(folder / "copy.pt"))
        ],
        "import torch": [sys.executable, "-c", "import torch"],
        "import mlx_gradscale.convert": [
            *(sys.executable, "-c", "import mlx_gradscale.convert")
        ],
    }


def measure(
    size: float,
    rounds: int,
    place: str | None = None,
    width: int = 1024,
    only: str = "",
) -> tuple[int, dict[str, list[Cost]]]:
    """Let the contenders take turns.

    Args:
        size (float): Bytes of tensors, at least.
        rounds (int): How often each runs.
        place (str, optional): Where to write. Default: a temporary folder.
        width (int): Of the model's layers. Default: ``1024``.
        only (str): What the names of the contenders begin with. Default: ``""``.

    Returns:
        tuple: The bytes of tensors there were, and the costs by contender.
    """
    with tempfile.TemporaryDirectory(dir=place) as name:
        folder = Path(name)
        make = [sys.executable, "-c", _MAKE, str(folder / "run.pt")]
        make += [str(size), str(width)]
        total = int(subprocess.run(make, check=True, capture_output=True).stdout)
        commands = contenders(folder)
        costs: dict[str, list[Cost]] = {
            key: [] for key in commands if key.startswith(only)
        }
        for _ in range(rounds):
            for key, found in costs.items():
                found.append(cost(*commands[key]))
            shutil.rmtree(folder / "run")
            (folder / "back.pt").unlink()
            (folder / "copy.pt").unlink(missing_ok=True)
    return total, costs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", help="where to write; a temporary one if not given")
    arguments = parser.parse_args()
    size = arguments.gigabytes * 1e9
    total, costs = measure(size, arguments.rounds, arguments.folder)
    print(f"{total / 1e9:.2f} GB of tensors, {arguments.rounds} rounds\n")
    print(f"{'':<30}{'best s':>8}{'median s':>10}{'cpu s':>8}{'peak / tensors':>16}")
    for key, found in costs.items():
        seconds = [one.seconds for one in found]
        middle = statistics.median(seconds), statistics.median(c.cpu for c in found)
        peak = max(one.peak for one in found) / total
        print(
            f"{key:<30}{min(seconds):>8.2f}{middle[0]:>10.2f}{middle[1]:>8.2f}"
            f"{peak:>16.2f}"
        )


if __name__ == "__main__":
    main()
