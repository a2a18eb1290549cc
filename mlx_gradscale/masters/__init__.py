"""Float32 masters of half-precision parameters: which count, and how they are kept."""

from .half import BITS, HALF, full_precision, half_bits, to_float32
from .remainder import Joined
from .store import KINDS, Masters, join_kept

__all__ = [
    "BITS",
    "HALF",
    "KINDS",
    "Joined",
    "Masters",
    "full_precision",
    "half_bits",
    "join_kept",
    "to_float32",
]
