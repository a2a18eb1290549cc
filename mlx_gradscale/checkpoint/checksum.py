"""A checksum of an array, computed where the array is."""

from typing import cast

import mlx.core as mx

_WORDS = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32, 8: mx.uint32}
# So many words at a time: the products of each piece are held in memory.
_PIECE = 2**22


@mx.compile
def _sums(words: mx.array, start: mx.array) -> mx.array:
    # Each word times an odd number of its own: a word that changes always shows,
    # two that change places nearly always. Knuth's and Murmur's multipliers.
    index = mx.arange(words.size, dtype=mx.uint32) + start
    words = words.astype(mx.uint32) + 1
    one = words * (index * 2654435761 | 1)
    two = (words ^ (words >> 15)) * ((index ^ (index >> 16)) * 2246822507 | 1)
    return mx.stack([mx.sum(one), mx.sum(two)])


def bits(x: mx.array) -> mx.array:
    """Return the bits of an array, as unsigned numbers in one dimension."""
    return x.reshape(-1).view(_WORDS[x.dtype.size])


def checksum(x: mx.array) -> str:
    """Return 16 hexadecimal digits that tell the bits of ``x`` from others.

    Against mistakes, not against an enemy. The same on every device.

    Example:
        >>> checksum(mx.array([1, 2])) == checksum(mx.array([2, 1]))
        False
    """
    if not x.size:
        return "0" * 16
    words = bits(x)
    total = mx.zeros(2, mx.uint32)
    for start in range(0, words.size, _PIECE):
        piece = words[start : start + _PIECE]
        total = total + _sums(piece, mx.array(start % 2**32, mx.uint32))
        mx.eval(total)
    return "".join(f"{part:08x}" for part in cast(list[int], total.tolist()))
