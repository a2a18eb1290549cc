"""Pictures show the data they were given, and the command draws a file."""

import math
import os
import subprocess
import sys
import warnings
from dataclasses import replace

import mlx.core as mx
import pytest

from mlx_gradscale import GradScaler
from mlx_gradscale.diagnostics import ScaleHistory, gradient_histogram
from mlx_gradscale.diagnostics.rounding import LostUpdates
from mlx_gradscale.float32 import Float32Search, Row
from mlx_gradscale.plot import (
    main,
    plot_gradients,
    plot_headroom,
    plot_history,
    plot_lost_updates,
)

matplotlib = pytest.importorskip("matplotlib")

ROWS = "1,65536.0,1,1.0,4.0", "2,32768.0,0,nan,inf", "3,16384.0,0,,2.0"


def write_history(folder, rows):
    path = folder / "run.csv"
    path.write_text("\n".join(["step,scale,applied,grad_norm,loss", *rows, ""]))
    return path


@pytest.fixture
def run(tmp_path):
    return write_history(tmp_path, [*ROWS, "4,16384.0,1,0.5,1.0"])


def texts(figure):
    return [text.get_text() for text in figure.findobj(matplotlib.text.Text)]


def test_history_plot_has_a_panel_per_column_and_marks_skipped_steps(run):
    figure = plot_history(run)
    labels = [axes.get_ylabel() for axes in figure.axes]
    assert labels == ["loss", "loss scale", "gradient norm"]
    values = [axes.get_lines()[0].get_ydata() for axes in figure.axes]
    assert [[x for x in each if math.isfinite(x)] for each in values] == [
        [4.0, 2.0, 1.0],
        [16, 15, 14, 14],
        [1.0, 0.5],
    ]
    for axes in figure.axes:
        assert list(axes.get_lines()[1].get_xdata()) == [2, 3]
    assert {"4 steps, 2 skipped", "skipped step"} <= set(texts(figure))


def test_constant_scale_has_one_tick_per_power(tmp_path):
    path = write_history(tmp_path, [f"{i},65536.0,1,,1.0" for i in range(9)])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        figure = plot_history(path, tmp_path / "run.png")
    labels = [text.get_text() for text in figure.axes[1].get_yticklabels()]
    assert "$2^{16}$" in labels
    assert len(set(labels)) == len(labels)


def gradients():
    return {f"l{i}": mx.full((4,), 2.0 ** (-30 + 3 * i)) for i in range(3)}


def test_gradient_plot_bars_show_shares_without_and_with_scaling():
    figure = plot_gradients(gradients(), scale=GradScaler(2.0**16))
    for axes, shift in zip(figure.axes, (0, 16), strict=True):
        bars = axes.patches[:3]
        middles = [bar.get_x() + bar.get_width() / 2 for bar in bars]
        expected = [-29.5 + shift, -26.5 + shift, -23.5 + shift]
        assert middles == pytest.approx(expected)
        assert [bar.get_height() for bar in bars] == pytest.approx([100 / 3] * 3)
    assert {"underflow\n66.67%", "normal\n100.00%"} <= set(texts(figure))
    assert "with loss scale $2^{16}$" in texts(figure)
    histogram = gradient_histogram({"w": mx.array([0.0, float("inf"), 1.0, 1.0])})
    text = "not drawn: 25.00% zero, 25.00% inf or NaN"
    assert text in texts(plot_gradients(histogram))


def search(layers=5, where=("layers.1 to layers.2",), **changed):
    rows = [Row("", 1.0, False)]
    rows += [Row(f"layers.{i}", 2.0, False) for i in range(layers)]
    rows[2] = replace(rows[2], is_float32=bool(where), **changed)
    return Float32Search(list(where), {}, rows)


def test_headroom_plot_shows_the_limit_and_the_float32_layers():
    text = "0 of 5 layers overflow in float16; 100.0% of parameters stay in float16"
    assert text in texts(plot_headroom(search(largest=4e4)))
    figure = plot_headroom(search(largest=1e5))
    assert {text.replace("0 of", "1 of"), "layers.1", "65504"} <= set(texts(figure))
    (axes,) = figure.axes
    half, full, _ = axes.lines
    assert list(half.get_ydata()) == [0, 2, 3, 4]
    assert [2**x for x in half.get_xdata()] == pytest.approx([2] * 4)
    assert [2**x for x in full.get_xdata()] == pytest.approx([1e5])
    assert full.get_label() == "computes in float32"
    rows = [Row("layers.0", 1e5, False, float(mx.finfo(mx.bfloat16).max))]
    figure = plot_headroom(Float32Search([], rows=rows))
    assert {"0 of 1 layers overflow in bfloat16", "3.3895e+38"} <= {*texts(figure)}
    figure = plot_headroom(search(where=["layers.1"], largest=3.0))
    assert any(x.startswith("1 of 5 layers overflow in") for x in texts(figure))


def lost(layers=3):
    row = LostUpdates(0.25, 0.5)
    parts = {f"layers.{i}": row for i in range(layers)}
    parts["layers.1"] = LostUpdates(0.75, 1.0)
    return LostUpdates(0.5, 0.6, parts, "Half is lost.")


def test_lost_updates_plot_shows_both_shares_of_each_layer():
    figure = plot_lost_updates(lost())
    (axes,) = figure.axes
    values = [list(line.get_xdata()) for line in axes.lines]
    assert values == [[0.5, 1.0, 0.5], [0.25, 0.75, 0.25]]
    found = {"Half is lost.", "lost update", "weights that do not move", "layers.2"}
    assert found <= set(texts(figure))


def test_plot_of_300_layers_shows_the_40_worst_in_order():
    found, report = search(300), lost(300)
    rows = [replace(row, largest=1e5 + i) for i, row in enumerate(found.rows[101:141])]
    found.rows[101:141] = rows
    for i in range(100, 140):
        report.layers[f"layers.{i}"] = LostUpdates(1.0, 1.0)
    for figure in (plot_headroom(found), plot_lost_updates(report)):
        labels = [x.get_text() for x in figure.axes[0].get_yticklabels()]
        assert labels == [f"layers.{i}" for i in range(100, 140)]


@pytest.mark.parametrize("suffix", [".png", ".svg", ".pdf"])
def test_plots_are_saved_without_changing_matplotlib_settings(run, tmp_path, suffix):
    before = dict(matplotlib.rcParams)
    folder = tmp_path / "pictures"
    folder.mkdir()
    plot_history(run, folder / f"history{suffix}")
    plot_gradients(gradients(), folder / f"gradients{suffix}")
    plot_headroom(search(largest=1e5), folder / f"headroom{suffix}")
    plot_lost_updates(lost(), folder / f"lost{suffix}")
    assert [p.stat().st_size > 1000 for p in folder.iterdir()] == [True] * 4
    assert dict(matplotlib.rcParams) == before


def test_plotting_empty_data_is_an_error_and_writes_no_file(run, tmp_path):
    with pytest.raises(ValueError, match="empty"):
        plot_history(ScaleHistory())
    with pytest.raises(ValueError, match="zero"):
        plot_gradients({"w": mx.zeros(3)})
    with pytest.raises(ValueError, match="must be positive"):
        plot_gradients(gradients(), scale=-1.0)
    with pytest.raises(ValueError, match=r"nothing to plot. Weights are NaN"):
        plot_headroom(Float32Search([], problem="Weights are NaN."))
    with pytest.raises(ValueError, match=r"nothing to plot. It is zero"):
        plot_lost_updates(LostUpdates(math.nan, math.nan, verdict="It is zero."))
    with pytest.raises(ValueError, match=r"'txt' is not supported .*png"):
        plot_history(run, tmp_path / "run.txt")
    assert [path.name for path in tmp_path.iterdir()] == ["run.csv"]


def test_plot_command_writes_a_file_or_one_line_about_the_error(run, tmp_path, capsys):
    output, beside = str(tmp_path / "a.png"), str(tmp_path / "run.png")
    assert [main([str(run), "-o", output]), main([str(run)])] == [0, 0]
    assert capsys.readouterr().out.split() == [output, beside]
    assert all(map(os.path.exists, (output, beside)))
    (tmp_path / "other.csv").write_text("a,b\n")
    for name in ("none.csv", "other.csv"):
        assert main([str(tmp_path / name)]) == 1
        error = capsys.readouterr().err
        assert error.startswith("error: ")
        assert name in error
        assert error.count("\n") == 1


def test_error_without_matplotlib_names_the_plot_extra(run):
    # A fresh interpreter: the package itself must not need matplotlib either.
    program = (
        "import sys; sys.modules['matplotlib'] = None\n"
        "from mlx_gradscale.plot import plot_history\n"
        "try: plot_history(sys.argv[1])\n"
        "except ImportError as error: print(error)\n"
    )
    command = [sys.executable, "-c", program, str(run)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert "mlx_gradscale[plot]" in done.stdout, done.stderr
