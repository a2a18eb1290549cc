"""Plot the result of a search for float32 layers."""

import math
from typing import Any

from ..float32_layers import Float32Search, Row
from .style import Figure, Output, label_powers, new_figure

# The exponent of float16's smallest positive number: the axis is linear.
_LOWEST = -24.0
_MOST_NAMES = 40


def plot_headroom(
    search: Float32Search,
    path: Output = None,
    *,
    dark: bool = False,
) -> Figure:
    """Plot how close each layer's values come to the dtype's maximum (float16: 65504).

    If the search found layers that must compute in float32, a second panel highlights
    them. A cross above the limit marks such a layer if its inputs and outputs fit.
    Usually, an intermediate result overflows, such as the mean of squares in a norm.

    Args:
        search (Float32Search): The result of ``find_float32_layers``.
        path (str, optional): The ``.png``, ``.svg`` or ``.pdf`` file to write.
        dark (bool): Use colors for a dark background. Default: ``False``.

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
    lost = [i for i, row in enumerate(rows) if row.overflows_inside or row.headroom < 0]
    dtype = "float16" if rows[0].maximum == 65504.0 else "bfloat16"
    titles = [f"all in {dtype}: {len(lost)} of {len(rows)} layers overflow"]
    if search.where:
        share = f"{search.float16_parameters:.1%}"
        titles += [f"with float32 layers: {share} of parameters in {dtype} layers"]
    # Label all layers that overflow, and as many others as fit.
    apart = math.ceil(len(rows) / _MOST_NAMES)
    others = range(0, len(rows), apart)
    shown = lost + [i for i in others if all(abs(i - j) >= apart for j in lost)]
    names = [rows[i].layer for i in shown]
    size = (9.0, 0.9 + 2.4 * len(titles) + 0.055 * max(map(len, names)))
    with new_figure(len(titles), size, dark, path) as (figure, panels, colors):
        for axes, title in zip(panels, titles, strict=True):
            _draw(axes, rows, axes is not panels[0], colors)
            axes.set_title(title)
        panels[-1].set_xticks(shown, names, rotation=90, fontsize=7)
        figure.supylabel("largest magnitude", fontsize=9)
    return figure


def _draw(axes: Any, rows: list[Row], cured: bool, colors: dict[str, str]) -> None:
    limit = math.log2(rows[0].maximum)
    powers = {i: math.log2(row.largest) for i, row in enumerate(rows) if row.largest}
    look: Any = {"color": colors["line"], "ms": 4, "label": "inputs and outputs"}
    axes.plot([*powers], [*powers.values()], "o", **look)
    inside = [i for i, row in enumerate(rows) if row.overflows_inside and not cured]
    if inside:
        look = {"color": colors["alarm"], "ms": 6, "label": "overflows inside"}
        axes.plot(inside, [limit + 1.5] * len(inside), "X", **look)
    in_float32 = [i for i, row in enumerate(rows) if cured and row.is_float32]
    for i in in_float32:
        label = "in float32" if i == in_float32[0] else ""
        axes.axvspan(i - 0.5, i + 0.5, color=colors["normal"], lw=0, label=label)
    axes.set_xlim(-0.8, len(rows) - 0.2)
    bottom, top = axes.get_ylim()
    axes.set_ylim(max(bottom, _LOWEST), max(top, limit) + 3)
    axes.axhspan(limit, axes.get_ylim()[1], color=colors["lost"], lw=0, zorder=0)
    axes.axhline(limit, color=colors["alarm"], lw=1.0, zorder=1)
    place = {"transform": axes.get_yaxis_transform(), "va": "center", "fontsize": 8}
    axes.text(1.005, limit, f"{rows[0].maximum:.5g}", color=colors["alarm"], **place)
    label_powers(axes.yaxis)
    axes.grid(False, axis="x")
    axes.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=4)
