"""Format tables, numbers and dtype names as text."""

import math
from collections.abc import Iterable, Sequence

from ..torch_checkpoint.tensors import dtype_name as dtype_name


def printable(value: object) -> str:
    """Convert a value to text, escaping characters that could control a terminal."""
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape").decode()
        for c in str(value)
    )


def shorten(value: object, width: int = 80) -> str:
    """Return a value as printable text of at most ``width`` characters."""
    text = value if isinstance(value, str) else repr(value)
    text = printable(text[: width + 1])  # cut first: an untrusted text may be long
    return text if len(text) <= width else f"{text[: width - 3]}..."


def list_some(names: Iterable[object], count: int = 6) -> str:
    """Join up to ``count`` names with commas, and add the number of any others."""
    names = [*names]
    more = f" and {len(names) - count} more" if len(names) > count else ""
    return ", ".join(map(shorten, names[:count])) + more


def plural(count: int, noun: str) -> str:
    """Format a number of things, such as ``1 step`` or ``2 steps``."""
    return f"{count:,} {noun}{'s' * (count != 1)}"


def align(rows: Iterable[Sequence[object]], left: int = 1) -> str:
    """Format rows as a table whose first ``left`` columns are left-aligned.

    Each cell is shortened to at most 200 printable characters.
    """
    cells = [[shorten(str(cell), 200) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    columns = [f"{{:{'<' if i < left else '>'}{n}}}" for i, n in enumerate(widths)]
    return "\n".join("  ".join(columns).format(*row).rstrip() for row in cells)


def power(value: float) -> str:
    """Format powers of two like ``2^16``, other numbers to four significant digits.

    Zero, negative and non-finite numbers are formatted with ``str``.
    """
    if not math.isfinite(value) or value <= 0:
        return str(value)
    mantissa, exponent = math.frexp(value)
    return f"2^{exponent - 1}" if mantissa == 0.5 else f"{value:.4g}"


def percent(share: float) -> str:
    """Format a fraction as a percentage; ``0`` means exactly zero."""
    if share == 0:
        return "0"
    return "<0.01%" if share < 1e-4 else f"{share:.2%}"
