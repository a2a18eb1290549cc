"""The sections of the suite: a name, and the function that measures it.

A new section is a module with ``measure(rounds) -> Section`` and a line here; its
figures are in the report, the file and, by a marker, in the README without more.
"""

from collections.abc import Callable

from . import (
    by_hand,
    by_optimizer,
    cost,
    counts,
    first_call,
    growth,
    memory,
    reading,
    torch_peer,
)
from .rows import Section

Measure = Callable[[int], Section]

FULL: dict[str, Measure] = {
    "counts": lambda rounds: counts.measure(),
    "cost": cost.measure,
    "by-hand": by_hand.measure,
    "by-optimizer": by_optimizer.measure,
    "growth": growth.measure,
    "memory": lambda rounds: Section(figures=memory.measure()),
    "reading": reading.measure,
    "first-call": lambda rounds: first_call.measure(leaves=32),
    "torch": torch_peer.measure,
}

# The counts, and enough of the rest to see that it works.
_SMALL = [(500, 500)] * 4
QUICK: dict[str, Measure] = {
    "counts": lambda rounds: counts.measure(),
    "cost": lambda rounds: cost.measure(rounds, _SMALL),
    "by-hand": lambda rounds: by_hand.measure(rounds, _SMALL),
    "growth": lambda rounds: growth.measure(rounds, [(8, 8), (80, 80)], [10, 100]),
    "reading": lambda rounds: reading.measure(rounds, _SMALL),
    "torch": lambda rounds: torch_peer.measure(rounds, _SMALL),
}
