"""The examples run as they are, without warnings, and learn."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(name, *arguments, folder="examples"):
    done = subprocess.run(
        [sys.executable, "-W", "error", str(ROOT / folder / name), *arguments],
        capture_output=True,
        text=True,
        timeout=1500,  # it hangs
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_quickstart_needs_master_weights_and_loss_scaling_to_match_float32(tmp_path):
    pytest.importorskip("tqdm", reason="the examples are not installed")
    picture = tmp_path / "quickstart.png"
    output = run("quickstart.py", "--steps", "25", "--picture", str(picture))
    assert picture.stat().st_size > 10_000
    row = re.compile(r"^(float\S.*?)  +(\S+) +(\S+) dB +(\S+)%$", re.MULTILINE)
    rows = {name: tuple(map(float, rest)) for name, *rest in row.findall(output)}
    wanted, wanted_quality, _ = rows["float32"]
    assert str(rows["float16"][0]) == "nan"
    _, quality, zero = rows["float16 + master weights"]
    assert zero > 40  # all of them after 100 steps
    assert quality < wanted_quality - 0.5
    loss, quality, zero = rows["float16 + master weights + loss scale"]
    assert zero < 1
    assert loss == pytest.approx(wanted, rel=0.1)
    assert quality == pytest.approx(wanted_quality, abs=0.2)


def test_finetuning_in_half_precision_needs_the_package_to_match_float32(tmp_path):
    pytest.importorskip("mlx_lm", reason="mlx-lm is not installed")
    picture = tmp_path / "finetune.png"
    output = run("finetune.py", "--quick", "--picture", str(picture))
    assert picture.stat().st_size > 10_000
    shares = output.partition("share of float32's progress")[2]
    rows = dict(re.findall(r"^(b?float\S.*?)  +(\S+)", shares, re.MULTILINE))
    assert rows.pop("float16") == "NaN"
    kept = {name: float(share.rstrip("%")) for name, share in rows.items()}
    assert kept.pop("bfloat16") < 50  # 22
    assert len(kept) == 4
    assert all(share == pytest.approx(100, abs=10) for share in kept.values())


@pytest.mark.compiles
def test_compiled_step_example_learns():
    output = run("compiled_step.py")
    assert float(re.search(r"accuracy ([\d.]+)%", output)[1]) > 95


def test_own_loop_example_learns_after_skipping_its_first_steps():
    output = run("own_loop.py")
    # It starts with a scale of 2**22 on purpose: the first steps overflow.
    assert "skipped" in output.splitlines()[0]
    assert "skipped" not in output.splitlines()[-2]
    assert float(re.search(r"accuracy ([\d.]+)%", output)[1]) > 95


def test_gan_example_learns():
    output = run("gan.py")
    # It starts 2.2 away.
    assert float(re.search(r"mean is ([\d.]+) from", output)[1]) < 0.6


def test_resume_example_continues_a_killed_run_bit_identically():
    output = run("resume.py")
    assert "killed in step 34\n" in output
    assert "resumed at step 30\n" in output
    assert "60 of 60 losses are bit-identical" in output


def test_make_pictures_draws_the_pictures_that_no_example_draws(tmp_path):
    pytest.importorskip("tqdm", reason="the examples are not installed")
    arguments = ["--steps", "12", "--output", str(tmp_path)]
    run("make_pictures.py", *arguments, folder="tools")
    committed = {path.name for path in (ROOT / "examples" / "pictures").iterdir()}
    drawn = {path.name for path in tmp_path.iterdir()}
    assert drawn == committed - {"finetune.png", "quickstart.png"}


def test_torch_resume_example_agrees_with_pytorch():
    pytest.importorskip("torch", reason="PyTorch is not installed")
    output = run("torch_resume.py")
    line = r"loss ([\d.]+) \(PyTorch ([\d.]+)\), scale (\d+) .*?(\d+)\)"
    steps = re.findall(line, output)
    assert len(steps) == 10
    for ours, theirs, scale, their_scale in steps:
        assert float(ours) == pytest.approx(float(theirs), rel=1e-4)
        assert scale == their_scale
    assert "PyTorch continues" in output
