"""Float32 masters of half-precision parameters: which count, and how they are kept."""

from .half import BITS, HALF, full_precision, half_bits, to_float32
from .store import KINDS, Masters

__all__ = [
    "BITS",
    "HALF",
    "KINDS",
    "Masters",
    "full_precision",
    "half_bits",
    "to_float32",
]
