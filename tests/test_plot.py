"""Pictures hold what they promise, and the command draws a file."""

import subprocess
import sys

import mlx.core as mx
import pytest

from mlx_gradscale import GradScaler
from mlx_gradscale.diagnostics import ScaleHistory, gradient_histogram
from mlx_gradscale.float16 import Float32Search, Reason, Row
from mlx_gradscale.plot import main, plot_gradients, plot_headroom, plot_history

pytest.importorskip("matplotlib")


def history(path=None, steps=12, skips=(3, 4, 9)):
    """A history with a skip, and a halved scale, at the steps named."""
    scaler, made = GradScaler(), ScaleHistory(path)
    for i in range(1, steps + 1):
        applied = i not in skips
        scaler.state["last_step_applied"] = mx.array(applied)
        if not applied:
            scaler.update(scaler.state["scale"] * 0.5)
        norm = 1.0 / i if applied else float("nan")
        made.record(scaler, loss=float("inf") if i == 3 else 1.0 / i, grad_norm=norm)
    made.flush()
    return made


def gradients(rows=3, scale=1.0):
    grads = {f"l{i}": mx.full((4,), 2.0 ** (-30 + 3 * i % 40)) for i in range(rows)}
    return gradient_histogram(grads, scale)


def texts(figure):
    from matplotlib.text import Text

    return [text.get_text() for text in figure.findobj(Text)]


def test_a_history_has_three_panels_and_a_mark_on_every_skip():
    figure = plot_history(history())
    loss, scale, _ = figure.axes
    assert [axes.get_ylabel() for axes in figure.axes] == [
        "loss",
        "loss scale",
        "gradient norm",
    ]
    line, marks = scale.get_lines()
    assert list(marks.get_xdata()) == [3, 4, 9]
    assert list(marks.get_ydata()) == [2.0**15, 2.0**14, 2.0**13]
    assert line.get_ydata()[0] == 65536.0
    assert scale.get_yscale() == "log"
    assert scale.yaxis.get_transform().base == 2
    assert [list(x.get_xdata()) for x in loss.get_lines()[1:]] == [
        [3, 3],
        [4, 4],
        [9, 9],
    ]
    assert "12 steps, 3 skipped" in texts(figure)


def test_a_run_of_nan_says_so_and_short_runs_have_whole_steps():
    made = ScaleHistory()
    for _ in range(3):
        made.record(GradScaler(), loss=float("nan"), grad_norm=1.0)
    figure = plot_history(made)
    figure.draw_without_rendering()
    loss, _, norm = figure.axes
    assert [text.get_text() for text in loss.texts] == ["inf or NaN in every step"]
    assert not norm.texts
    assert all(step == int(step) for step in norm.get_xticks())


def test_plain_gradients_are_drawn_as_their_histogram():
    grads = {"w": mx.full((4,), 2.0**-26), "b": mx.ones(4)}
    plain, counted = plot_gradients(grads), plot_gradients(gradient_histogram(grads))
    assert texts(plain) == texts(counted)
    assert "underflow\n50.00%" in texts(plain)


def test_the_ranges_have_the_same_names_in_both_pictures():
    names = {"underflow", "subnormal", "normal", "overflow"}
    bars, layers = (plot_gradients(gradients(), layers=each) for each in (False, True))
    assert names == {text.split("\n")[0] for text in texts(bars)} & names
    assert names == set(texts(layers)) & names


def test_panels_without_data_are_left_out():
    made = ScaleHistory()
    made.record(GradScaler())
    assert len(plot_history(made).axes) == 1


def test_bars_are_the_shares_before_and_after():
    figure = plot_gradients(gradients(), scale=2.0**16)
    before, after = figure.axes
    assert sorted(bar.get_x() + 0.425 for bar in before.patches[:3]) == pytest.approx(
        [-29.5, -26.5, -23.5]
    )
    assert sorted(bar.get_x() + 0.425 for bar in after.patches[:3]) == pytest.approx(
        [-13.5, -10.5, -7.5]
    )
    found = texts(figure)
    assert "underflow\n66.67%" in found
    assert "normal\n100.00%" in found


def test_the_heat_map_has_a_row_per_leaf():
    figure = plot_gradients(gradients(rows=5), layers=True)
    image = figure.axes[0].get_images()[0].get_array()
    assert image.shape[0] == 5
    assert image.filled(0).sum() == pytest.approx(5.0)
    labels = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert labels == [f"l{i}" for i in range(5)]


def test_many_leaves_are_drawn_with_some_names():
    figure = plot_gradients(gradients(rows=200), layers=True)
    assert figure.get_figheight() <= 14
    assert 50 <= len(figure.axes[0].get_yticks()) <= 72
    assert figure.axes[0].get_images()[0].get_array().shape[0] == 200


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("suffix", [".png", ".svg", ".pdf"])
def test_pictures_are_written(tmp_path, dark, suffix):
    path = tmp_path / f"run{suffix}"
    figure = plot_history(history(), path, dark=dark)
    assert path.stat().st_size > 1000
    assert [p.name for p in tmp_path.iterdir()] == [path.name]
    page = sum(figure.get_facecolor()[:3])
    assert page < 0.5 if dark else page > 2.5


@pytest.mark.parametrize("draw", ["bars", "layers"])
def test_pictures_of_gradients_are_small_enough_for_a_readme(tmp_path, draw):
    path = tmp_path / "gradients.png"
    plot_gradients(gradients(rows=30), path, layers=draw == "layers")
    assert 1000 < path.stat().st_size < 150_000


def test_nothing_global_is_left_behind():
    import matplotlib

    before = dict(matplotlib.rcParams)
    plot_history(history(), dark=True)
    assert dict(matplotlib.rcParams) == before


def test_there_must_be_something_to_draw(tmp_path):
    with pytest.raises(ValueError, match="empty"):
        plot_history(ScaleHistory())
    with pytest.raises(ValueError, match="zeros"):
        plot_gradients(gradient_histogram({"w": mx.zeros(3)}))
    path = tmp_path / "run.txt"
    with pytest.raises(ValueError, match=r"use one of .*\.png"):
        plot_history(history(), path)
    assert not path.exists()


@pytest.mark.parametrize("suffix", [".csv", ".jsonl"])
def test_the_command(tmp_path, capsys, suffix):
    run = tmp_path / f"run{suffix}"
    history(run)
    assert main([str(run), "-o", str(tmp_path / "a.png"), "--dark"]) == 0
    assert main([str(run)]) == 0
    assert (tmp_path / "a.png").exists()
    assert (tmp_path / "run.png").exists()
    assert capsys.readouterr().out.split() == [
        str(tmp_path / "a.png"),
        str(tmp_path / "run.png"),
    ]


def test_the_command_says_what_is_wrong(tmp_path, capsys):
    assert main([str(tmp_path / "none.csv")]) == 1
    (tmp_path / "other.csv").write_text("a,b\n")
    assert main([str(tmp_path / "other.csv")]) == 1
    errors = capsys.readouterr().err
    assert "none.csv" in errors
    assert "begin as a history" in errors


def test_without_matplotlib_the_extra_is_named(tmp_path):
    # The import is refused in a fresh interpreter; the package itself must not
    # have needed it.
    program = (
        "import sys; sys.modules['matplotlib'] = None\n"
        "from mlx_gradscale import GradScaler\n"
        "from mlx_gradscale.diagnostics import ScaleHistory\n"
        "from mlx_gradscale.plot import plot_history\n"
        "h = ScaleHistory(); h.record(GradScaler())\n"
        "try: plot_history(h)\n"
        "except ImportError as error: print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120
    )
    assert "mlx_gradscale[plot]" in done.stdout, done.stderr


def headroom(layers=5, where=("layers.1 to layers.2",)):
    rows = [Row("", 1.0, 0.0, False)]
    rows += [
        Row(f"layers.{i}", 1e5 if i == 1 else 2.0, 30.0, i in (1, 2) and bool(where))
        for i in range(layers)
    ]
    reasons = [Reason(entry, "layers.1", "values of 1e+05") for entry in where]
    return Float32Search(list(where), reasons, rows, scale=1024.0)


@pytest.mark.parametrize("dark", [False, True])
def test_headroom_is_drawn_before_and_after(tmp_path, dark):
    path = tmp_path / "headroom.png"
    figure = plot_headroom(headroom(), path, dark=dark)
    assert path.stat().st_size > 10_000
    assert len(figure.axes) == 2
    found = texts(figure)
    assert "all in float16: 1 of 5 layers overflow" in found
    assert "layers.4" in found
    assert "65504" in found
    assert "backward, loss scale 2^10" in found
    before, after = (
        [line for line in axes.lines if len(line.get_xdata()) == 5]
        for axes in figure.axes
    )
    assert max(line.get_ydata()[1] for line in before) == 1e5
    filled = [x.get_ydata() for x in after if x.get_markerfacecolor() != "none"]
    assert all(str(values[1]) == "nan" for values in filled)


def test_a_model_without_float32_layers_has_one_panel_and_many_layers_few_names():
    figure = plot_headroom(headroom(300, where=()), title="mine")
    assert len(figure.axes) == 1
    assert "mine" in texts(figure)
    assert len({text for text in texts(figure) if text.startswith("layers.")}) <= 40


def test_a_search_that_ended_early_cannot_be_drawn():
    with pytest.raises(ValueError, match=r"nothing to draw. Weights are NaN"):
        plot_headroom(Float32Search([], problem="Weights are NaN."))
