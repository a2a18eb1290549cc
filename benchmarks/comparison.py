"""Compare phases of a step with each other, and give their memory back."""

import gc
import sys
import time
from collections.abc import Callable

import mlx.core as mx

from .rows import Row, rows_of
from .timing import interleave
from .variants import Phase

Makers = dict[str, Callable[[], Phase]]

_START = time.monotonic()


def compare(case: str, makers: Makers, rounds: int) -> list[Row]:
    """Time phases against the first one; they are freed afterwards."""
    say(case)
    phases = {name: make() for name, make in makers.items()}
    runs = {name: phase.run for name, phase in phases.items()}
    found = rows_of(case, interleave(runs, rounds))
    del phases, runs
    free()
    return found


def free() -> None:
    """Give the memory of what is no longer used back to the system."""
    gc.collect()
    mx.clear_cache()


def say(text: str) -> None:
    """Tell whoever waits what is being measured, apart from the results."""
    minutes, seconds = divmod(int(time.monotonic() - _START), 60)
    print(f"{minutes}:{seconds:02} {text}", file=sys.stderr, flush=True)
