"""Plot the result of a search for float32 layers."""

import math
from typing import Any

from ..float32 import Float32Search, Row
from .style import Figure, Output, label_powers, new_figure

# The exponent of float16's smallest positive number: the axis is linear.
_LOWEST = -24.0
_MOST_NAMES = 40


def plot_headroom(search: Float32Search, path: Output = None) -> Figure:
    """Plot how close each layer's values come to the dtype's maximum (float16: 65504).

    The background marks the layers that the search makes float32. A cross above the
    limit marks such a layer if its inputs and outputs fit. Usually, an intermediate
    result overflows, such as the mean of squares in a norm. In a model of more than 40
    layers, layers close to a layer with a larger value have no label.

    Args:
        search (Float32Search): The result of ``find_float32_layers``.
        path (str, optional): The ``.png``, ``.svg`` or ``.pdf`` file to write.

    Returns:
        Figure: The matplotlib figure.

    Example:
        >>> import mlx.core as mx, mlx.nn as nn
        >>> from mlx_gradscale import find_float32_layers
        >>> from mlx_gradscale.plot import plot_headroom
        >>> model, x = nn.Linear(2, 2), mx.ones((1, 2), mx.float16)
        >>> model.set_dtype(mx.float16)
        >>> found = find_float32_layers(model, lambda x: model(x).sum(), [x])
        >>> len(plot_headroom(found).axes)
        1
    """
    rows = [row for row in search.rows if row.layer] or list(search.rows)
    if not rows:
        raise ValueError(f"There is nothing to plot. {search.problem}".strip())
    lost = {i for i, row in enumerate(rows) if row.overflows_inside or row.headroom < 0}
    named = _choose_names(rows, lost)
    dtype = "float16" if rows[0].maximum == Row.maximum else "bfloat16"
    title = f"{len(lost)} of {len(rows)} layers overflow in {dtype}"
    hidden = len(lost - {*named})
    title += f" ({hidden} not labeled)" if hidden else ""
    if search.where:
        title += f"; {search.float16_parameters:.1%} of parameters stay in {dtype}"
    names = [rows[i].layer for i in named]
    size = (9.0, 3.5 + 0.055 * max(map(len, names)))
    with new_figure(1, size, path) as (figure, (axes,), colors):
        _draw(axes, rows, colors)
        axes.set_title(title, pad=20)
        axes.set_ylabel("largest magnitude")
        axes.set_xticks(named, names, rotation=90, fontsize=7)
        for i, label in zip(named, axes.get_xticklabels(), strict=True):
            label.set_color(colors["alarm" if i in lost else "text"])
    return figure


def _choose_names(rows: list[Row], lost: set[int]) -> list[int]:
    """Return the rows to label: those with the largest values, if labels fit."""
    apart = math.ceil(len(rows) / _MOST_NAMES)
    named: list[int] = []
    for i in sorted(range(len(rows)), key=lambda i: (i not in lost, rows[i].headroom)):
        if all(abs(i - other) >= apart for other in named):
            named.append(i)
    return sorted(named)


def _draw(axes: Any, rows: list[Row], colors: dict[str, str]) -> None:
    limit = math.log2(rows[0].maximum)
    in_float32 = [i for i, row in enumerate(rows) if row.is_float32]
    for i in in_float32:
        label = "computes in float32" if i == in_float32[0] else ""
        axes.axvspan(i - 0.5, i + 0.5, color=colors["normal"], lw=0, label=label)
    powers = {i: math.log2(row.largest) for i, row in enumerate(rows) if row.largest}
    look: Any = {"color": colors["line"], "ms": 4, "label": "inputs and outputs"}
    axes.plot([*powers], [*powers.values()], "o", **look)
    inside = [i for i, row in enumerate(rows) if row.overflows_inside]
    if inside:
        look = {"color": colors["alarm"], "ms": 6, "label": "overflows inside"}
        axes.plot(inside, [limit + 1.5] * len(inside), "X", **look)
    axes.set_xlim(-0.8, len(rows) - 0.2)
    bottom, top = axes.get_ylim()
    axes.set_ylim(max(bottom, _LOWEST), max(top, limit) + 3)
    axes.axhspan(limit, axes.get_ylim()[1], color=colors["lost"], lw=0, zorder=0)
    axes.axhline(limit, color=colors["alarm"], lw=1.0, zorder=1)
    place = {"transform": axes.get_yaxis_transform(), "va": "center", "fontsize": 8}
    axes.text(1.005, limit, f"{rows[0].maximum:.5g}", color=colors["alarm"], **place)
    label_powers(axes.yaxis)
    axes.grid(False, axis="x")
    axes.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=3, borderpad=0)
