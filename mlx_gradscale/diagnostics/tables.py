"""Rows of text, aligned."""

from collections.abc import Iterable, Sequence


def align(rows: Iterable[Sequence[object]], left: int = 1) -> str:
    """Return ``rows`` as lines, the first ``left`` columns to the left.

    >>> print(align([("leaf", "nan"), ("a.weight", 12)]))
    leaf      nan
    a.weight   12
    """
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = []
    for row in cells:
        padded = [
            cell.ljust(width) if i < left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(padded).rstrip())
    return "\n".join(lines)
