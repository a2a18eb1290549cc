"""Dict keys and set members from a file: which there can be, and what each costs.

The hashes of numbers and tuples are not secret, so a file can choose ones that all
lead to the same places of a table: n of them then cost n * n steps. Texts and bytes
are hashed with a key that a file cannot know.
"""

from collections.abc import Iterable
from typing import Any

from .foreign import Placeholder, TorchName, TorchSize
from .limits import Budget, CheckpointError

# A placeholder is itself as a key, wherever it is in memory.
_SECRET = frozenset({str, bytes, TorchName})
_FLAT = frozenset(
    {str, int, float, bool, bytes, type(None), complex, TorchName, Placeholder}
)
_OWN = frozenset({bool, Placeholder})
# Bytes that an entry takes in a table that is just growing.
_ENTRY = 100
# Passing a taken place costs some 10 ns, an operation 1 to 3 microseconds; comparing
# equal texts runs through a kilobyte in the time of a few places.
_PLACES = 128
_TEXT = 1024


class Keys:
    """Check and pay for keys before they are added to a container.

    Args:
        budget (Budget): What the file has left.
    """

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        # The id of a container -> how many of its keys have hashes that can be chosen.
        self._chosen: dict[int, int] = {}

    def add(self, target: Any, key: Any) -> None:
        """Pay for the key of a dict, or the member of a set, that is added next."""
        kind, place = type(key), id(target)
        if not target:  # one that is gone may have been at the same place
            self._chosen.pop(place, None)
        if kind not in _SECRET:
            check_key(key)
            # The keys 0, 1, 2, ... (an optimizer's) are never in each other's way.
            if kind not in _OWN and not (kind is int and 0 <= key <= len(target)):
                self._chosen[place] = self._chosen.get(place, 0) + 1
                self._budget.take(_ENTRY)
        weight = _weight(key)
        # A chosen one may be in any other key's way.
        met = self._chosen.get(place, 0) if self._chosen else 0
        self._budget.take(_ENTRY, weight * met // _PLACES + weight - 1)

    def fill(self, target: set[Any], members: Iterable[Any]) -> set[Any]:
        """Return the set with the members added; each is an operation of its own."""
        for member in members:
            self._budget.take(operations=1)
            self.add(target, member)
            target.add(member)
        return target


def check_key(key: Any) -> None:
    """Raise on a key or member that this package neither reads nor writes."""
    is_tuple = type(key) in (tuple, TorchSize) and len(key) <= 64
    parts = key if is_tuple else (key,)
    if not all(type(part) in _FLAT for part in parts):
        raise CheckpointError(
            f"a dict key or set member is of type {type(key).__name__}; only plain "
            "values and flat tuples of them can be."
        )


def _weight(key: Any) -> int:
    """Return how many places' time it takes to compare two keys of the same hash."""
    kind = type(key)
    if kind in _SECRET:
        return 1 + len(key) // _TEXT
    if kind in (tuple, TorchSize):
        return 1 + sum(map(_weight, key))
    # Of the other numbers hardly any have the same hash; then the next place is tried.
    return 8 if kind is complex or (kind is int and key.bit_length() > 64) else 1
