"""The ratios as one picture. Needs matplotlib."""

from pathlib import Path

from .rows import Row


def draw(rows: list[Row], path: Path) -> None:
    """Draw the optimizer phase: a bar per variant, the bare step at 1.

    Args:
        rows (list): Rows of the section "optimizer phase".
        path (Path): An image file; the suffix decides its format.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise SystemExit(
            "--plot needs matplotlib: pip install 'mlx_gradscale[plot]'."
        ) from error
    cases: dict[str, list[Row]] = {}
    for row in rows:
        cases.setdefault(row.case, []).append(row)
    height = sum(len(found) + 1 for found in cases.values())
    picture = Figure(figsize=(9, 1 + 0.22 * height), layout="constrained")
    axes = picture.subplots()
    position, places, labels = 0, [], []
    for case, found in cases.items():
        axes.text(0.02, position, case, va="center", fontsize=8, weight="bold")
        position += 1
        for row in found:
            colour = "tab:orange" if "scal" in row.variant.lower() else "tab:blue"
            error = [[row.ratio - row.low], [row.high - row.ratio]]
            axes.barh(position, row.ratio, color=colour, height=0.7, xerr=error)
            axes.text(
                row.high + 0.05, position, f"{row.ratio:.2f}", va="center", fontsize=7
            )
            places.append(position)
            labels.append(row.variant)
            position += 1
    axes.set_yticks(places, labels, fontsize=7)
    axes.axvline(1, color="black", linewidth=0.8)
    axes.invert_yaxis()
    axes.set_xlabel("time / bare optimizer of the same run (lower is better)")
    picture.savefig(path, dpi=120)
