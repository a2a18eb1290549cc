"""The table of docs/checkpoint_sources.md: a row for each source that a test went with.

A test tells what it found, and fails where the page says something else. To write the
page anew: WRITE_CHECKPOINT_SOURCES=1 pytest tests/test_sources.py tests/interop
"""

import os
import shlex
from pathlib import Path

import numpy as np
from interop_helpers import TOLERANCE

from mlx_gradscale.inspect import describe

PAGE = Path(__file__).parents[1] / "docs" / "checkpoint_sources.md"


def rows():
    """The lines of the page's table, by source."""
    table = PAGE.read_text().split("\n## ")[0]
    lines = [line for line in table.splitlines() if line.startswith("| ")]
    return {line.split(" | ")[0].removeprefix("| "): line for line in lines[1:]}


def check_row(source, *, inspect, to_mlx, onward, back):
    """Fails where the page does not say this of a source.

    Args:
        source: the program that wrote the checkpoint.
        inspect: what :func:`seen` gave.
        to_mlx: the flags that convert needed besides ``--model``, or a sentence.
        onward: what :func:`steps` gave in MLX.
        back: what :func:`steps` gave in PyTorch again.
    """
    flags = to_mlx
    if not isinstance(to_mlx, str):
        flags = f"`{shlex.join(to_mlx)}`" if to_mlx else "at once"
    line = f"| {source} | {inspect} | {flags} | {onward} | {back} |"
    if os.environ.get("WRITE_CHECKPOINT_SOURCES"):
        last = list(rows().values())[-1]
        old, new = rows().get(source, last), line
        if source not in rows():
            new = f"{last}\n{line}"
        PAGE.write_text(PAGE.read_text().replace(old, new))
    assert rows().get(source) == line


def seen(path):
    """What inspect finds in a checkpoint, in a few words."""
    try:
        found = describe(path)
    except ValueError:
        return "refused"
    words = ["model"] if found.get("tensors") else []
    if "optimizer" in found:
        optimizer = found["optimizer"]
        at = {f"{step:g}" for step in optimizer["steps"]}
        words.append(f"{optimizer['name']} at step {', '.join(sorted(at))}")
        if not at:
            words[-1] = optimizer["name"]
    return ", ".join(words + (["scaler"] if "scaler" in found else []))


def steps(losses, want, limit=TOLERANCE["rtol"]):
    """Losses against PyTorch's own: how many there are, and how near."""
    np.testing.assert_allclose(losses, want, rtol=limit, atol=limit)
    return f"{len(losses)} steps within {limit:g}".replace("e-0", "e-")
