"""Compute many arrays, with a progress bar."""

import sys
from collections.abc import Mapping

import mlx.core as mx

# Below this an evaluation is over before a bar could be read.
_BIG = 256 * 2**20


def evaluate(arrays: Mapping[str, mx.array], label: str = "converting") -> None:
    """Compute arrays; one by one with tqdm's bar, if it is there and they are big."""
    total = sum(array.nbytes for array in arrays.values())
    if total >= _BIG and sys.stderr.isatty():
        try:
            from tqdm import tqdm
        except ImportError:
            pass
        else:
            with tqdm(total=total, desc=label, unit="B", unit_scale=True) as bar:
                for array in arrays.values():
                    mx.eval(array)
                    bar.update(array.nbytes)
    mx.eval(*arrays.values())
