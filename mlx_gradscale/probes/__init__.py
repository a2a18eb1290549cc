"""Look into a forward and a backward pass without changing them."""

from .arguments import by_name, largest, made_small, too_large
from .layers import Event, Probes, probed, unchanged

__all__ = [
    "Event",
    "Probes",
    "by_name",
    "largest",
    "made_small",
    "probed",
    "too_large",
    "unchanged",
]
