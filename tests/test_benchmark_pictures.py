"""The benchmarks' pictures and tables: readable, and of the results in the file."""

import itertools
import re
from pathlib import Path

import numpy as np
import pytest

from benchmarks import drawing, publish
from benchmarks.results import Results
from benchmarks.rows import Section

pytest.importorskip("matplotlib")
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from matplotlib.image import imread
from matplotlib.text import Text

from mlx_gradscale.plot.theme import canvas

FOLDER = Path(publish.__file__).parent
RESULTS = Results.load(FOLDER / "results.json")
README = (FOLDER / "README.md").read_text(encoding="utf-8")


def painted(name: str, dark: bool = False):
    section, paint = drawing.PICTURES[name]
    footer = drawing.footer_of(RESULTS)
    figure = paint(RESULTS.sections[section], footer, dark)
    figure.draw_without_rendering()
    return figure


def texts_of(figure):
    """All texts but the labels of ticks outside the axes, which are not drawn."""
    outside = {
        tick.label1
        for axes in figure.axes
        for axis, (low, high) in (
            (axes.xaxis, sorted(axes.get_xlim())),
            (axes.yaxis, sorted(axes.get_ylim())),
        )
        for tick in axis.get_major_ticks()
        if not low <= tick.get_loc() <= high
    }
    for text in figure.findobj(Text):
        if text.get_visible() and text.get_text().strip() and text not in outside:
            yield text


@pytest.mark.parametrize("name", drawing.PICTURES)
def test_no_text_leaves_the_picture_or_meets_another(name):
    figure = painted(name)
    renderer = FigureCanvasAgg(figure).get_renderer()
    boxes = [
        # Without the box of page colour that is behind some.
        (text.get_text(), Text.get_window_extent(text, renderer))
        for text in texts_of(figure)
    ]
    width, height = figure.get_size_inches() * figure.dpi
    assert len(boxes) > 10
    for text, box in boxes:
        assert 0 <= box.x0 < box.x1 <= width, text
        assert 0 <= box.y0 < box.y1 <= height, text
    for (one, a), (other, b) in itertools.combinations(boxes, 2):
        apart = a.x1 <= b.x0 or b.x1 <= a.x0 or a.y1 <= b.y0 or b.y1 <= a.y0
        assert apart, f"{one!r} and {other!r} overlap"


@pytest.mark.parametrize("name", drawing.PICTURES)
def test_the_machine_is_under_every_picture(name):
    under = painted(name).get_supxlabel().replace("\n", " ")
    for part in ("processor", "mlx", "system", "date"):
        assert RESULTS.machine[part] in under


def test_texts_are_large_enough_on_a_phone():
    # 400 CSS pixels are 4 inches of 96 and a bit: a point is 1.39 of them.
    figure = painted("cost")
    assert figure.get_size_inches()[0] == 4.0
    sizes = [text.get_fontsize() for text in texts_of(figure)]
    assert min(sizes) * 400 / (4 * 72) >= 9


# Machado, Oliveira and Fernandes (2009), severity 1, on linear RGB.
BLIND = {
    "protan": [
        [0.152286, 1.052583, -0.204868],
        [0.114503, 0.786281, 0.099216],
        [-0.003882, -0.048116, 1.051998],
    ],
    "deutan": [
        [0.367322, 0.860646, -0.227968],
        [0.280085, 0.672501, 0.047413],
        [-0.011820, 0.042940, 0.968881],
    ],
}


def lab(color: str, kind: str) -> np.ndarray:
    rgb = np.array(to_rgb(color))
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    seen = np.clip(np.array(BLIND[kind]) @ linear, 0, 1)
    to_xyz = [
        [0.4124, 0.3576, 0.1805],
        [0.2126, 0.7152, 0.0722],
        [0.0193, 0.1192, 0.9505],
    ]
    x, y, z = np.cbrt(np.array(to_xyz) @ seen / [0.9505, 1.0, 1.089])
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("kind", BLIND)
@pytest.mark.parametrize("dark", [False, True])
def test_colours_are_apart_for_who_cannot_tell_red_from_green(kind, dark):
    with canvas(1, 1, dark, (1, 1)) as (_, _, colors):
        used = [colors[name] for name in ("page", "bar", "line")]
    for one, other in itertools.combinations(used, 2):
        assert np.linalg.norm(lab(one, kind) - lab(other, kind)) > 30


def test_a_section_that_was_not_measured_has_no_picture(tmp_path):
    sections = {"torch": Section(), "cost": RESULTS.sections["cost"]}
    found = drawing.draw_all(Results(RESULTS.machine, sections), tmp_path)
    assert [path.name for path in found] == ["cost-light.png", "cost-dark.png"]
    assert sorted(tmp_path.iterdir()) == sorted(found)
    light, dark = (imread(path) for path in found)
    assert light.shape == dark.shape
    assert light[0, 0, 0] > 0.9 > 0.1 > dark[0, 0, 0]


def test_the_readme_shows_every_picture_in_both_themes_at_phone_width():
    shown = set(re.findall(r'pictures/([\w-]+)\.png"', README))
    wanted = {f"{n}-{t}" for n in drawing.PICTURES for t in ("light", "dark")}
    assert shown == wanted
    assert README.count("<picture>") == README.count('width="400"') == len(wanted) / 2
    for name in wanted:
        assert imread(FOLDER / "pictures" / f"{name}.png").shape[1] == 800


def test_the_readme_says_what_the_results_say():
    assert README.count("<!-- begin ") >= 5
    assert publish.fill(README, RESULTS) == README, "run python -m benchmarks.publish"


def test_only_what_is_between_markers_is_written():
    text = "a\n<!-- begin machine -->\nold\n<!-- end machine -->\nb\n"
    found = publish.fill(text, RESULTS)
    assert found.startswith(
        "a\n<!-- begin machine -->\n" + RESULTS.machine["processor"]
    )
    assert found.endswith("\n<!-- end machine -->\nb\n")
    assert "old" not in found


@pytest.mark.parametrize(("load", "busy"), [(0.1, False), (9.0, True)])
def test_a_busy_machine_is_confessed(load, busy):
    quiet = RESULTS.machine | {"cores": 2, "load when it began": load}
    said = publish.the_machine(Results(quiet, {}))
    assert ("busy (load 9.0)" in said) == busy


def test_figures_of_any_section_can_be_shown():
    text = "<!-- begin figures counts -->\n<!-- end figures counts -->"
    assert "| traces, GradScaler | 1 | 1 | met |" in publish.fill(text, RESULTS)


@pytest.mark.parametrize("name", ["other", "rows other"])
def test_a_marker_that_nothing_fills_is_an_error(name):
    text = f"<!-- begin {name} -->\n<!-- end {name} -->"
    with pytest.raises(ValueError, match="other"):
        publish.fill(text, RESULTS)
