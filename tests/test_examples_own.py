"""The examples with loops of their own run as they are and learn."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"


def run(name, *arguments):
    done = subprocess.run(
        [sys.executable, "-W", "error", str(EXAMPLES / name), *arguments],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_compiled_step():
    output = run("compiled_step.py")
    assert float(re.search(r"accuracy ([\d.]+)%", output)[1]) > 95


def test_own_loop():
    output = run("own_loop.py")
    # It starts with a scale of 2**22 on purpose: the first steps overflow.
    assert output.startswith("step 1:")
    assert "skipped" in output.splitlines()[0]
    assert "skipped" not in output.splitlines()[-2]
    assert float(re.search(r"accuracy ([\d.]+)%", output)[1]) > 95


def test_gan():
    output = run("gan.py")
    # It starts 2.2 away.
    assert float(re.search(r"mean is ([\d.]+) from", output)[1]) < 0.6


def test_resume():
    output = run("resume.py")
    assert "killed in step 34\n" in output
    # Saved in the background after step 30, or not yet: then after step 20.
    assert re.search("goes on at step (20|30)\n", output)
    assert "60 of 60 losses are bit-identical" in output
    assert float(re.search(r"last one is ([\d.]+)", output)[1]) < 3


def test_make_pictures(tmp_path):
    pytest.importorskip("matplotlib")
    output = run("make_pictures.py", "--steps", "12", "--output", str(tmp_path))
    committed = {path.name for path in (EXAMPLES / "pictures").glob("*.png")}
    assert {path.name for path in tmp_path.iterdir()} == committed
    assert "of 12 steps skipped" in output


def test_the_pictures_in_the_repository_fit_a_readme():
    for path in (EXAMPLES / "pictures").glob("*.png"):
        assert path.stat().st_size < 150_000, path.name


@pytest.mark.parametrize(
    "name",
    ["compiled_step.py", "own_loop.py", "gan.py", "resume.py", "make_pictures.py"],
)
def test_each_says_when_to_use_it(name):
    text = (EXAMPLES / name).read_text()
    assert "Use this" in text or "Use it" in text
    assert len(text.splitlines()) < 120


def test_torch_resume():
    pytest.importorskip("torch", reason="PyTorch is not installed")
    output = run("torch_resume.py")
    line = r"loss ([\d.]+) \(PyTorch ([\d.]+)\), scale (\d+) .*?(\d+)\)"
    steps = re.findall(line, output)
    assert len(steps) == 10
    for ours, theirs, scale, their_scale in steps:
        assert float(ours) == pytest.approx(float(theirs), rel=1e-4)
        assert scale == their_scale
    assert "PyTorch goes on" in output
