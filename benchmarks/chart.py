"""Plot the time of the optimizer phase relative to MLX's optimizer alone."""

import os

from .harness import Rows

_COLORS = ("#0969da", "#54aeff", "#b6e3ff")


def draw(rows: Rows, path: str | os.PathLike[str], machine: str) -> None:
    """Draw the ratios in the table of ``optimizer_phase`` as bars, one color per size.

    Args:
        rows (list): The rows of the table.
        path (str): The file to write, ``.svg`` or ``.png``.
        machine (str): Description of the machine, shown below the chart.
    """
    from matplotlib.figure import Figure

    cases = list(dict.fromkeys(row["case"] for row in rows))
    sizes = list(dict.fromkeys(row["parameters"] for row in rows))
    figure = Figure(figsize=(8, 1.2 + 0.3 * len(cases) * len(sizes)), dpi=120)
    figure.set_layout_engine("constrained")
    axes = figure.subplots()
    height = 0.8 / len(sizes)
    for i, size in enumerate(sizes):
        ratios = {
            row["case"]: row["ratio"] for row in rows if row["parameters"] == size
        }
        at = [j + i * height for j, case in enumerate(cases) if case in ratios]
        color = _COLORS[i % len(_COLORS)]
        bars = axes.barh(at, ratios.values(), height, color=color, label=size)
        axes.bar_label(bars, fmt=" {:.2f}", fontsize=8)
    middles = [j + height * (len(sizes) - 1) / 2 for j in range(len(cases))]
    axes.set_yticks(middles, cases, fontsize=8)
    axes.invert_yaxis()
    axes.axvline(1.0, color="#24292f", lw=1)
    axes.set_xlabel("time of the optimizer phase / MLX's optimizer alone", fontsize=8)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(left=False, labelsize=8)
    if len(sizes) > 1:
        axes.legend(title="parameters", frameon=False, fontsize=8, title_fontsize=8)
    figure.text(0, 0, machine, fontsize=6, color="#57606a")
    figure.savefig(path)
