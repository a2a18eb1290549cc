"""The benchmarks measure what they say, and the command prints and writes it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import pytest

from benchmarks import harness, steps
from benchmarks.__main__ import main
from benchmarks.steps import CASES

ROOT = Path(__file__).parents[2]


def test_benchmarks_alternate_variants_and_report_the_lower_quartile():
    calls = []
    runs = {name: lambda name=name: calls.append(name) for name in "ab"}
    seconds = harness.take_turns(runs, rounds=3, warm_up=1)
    assert "".join(calls) == "ab" * 4
    assert all(value > 0 for value in seconds.values())
    assert harness.lower_quartile([4.0, 1.0, 2.0, 3.0, 5.0]) == 2.0
    assert harness.lower_quartile([4.0]) == 4.0


@pytest.mark.parametrize("name", CASES)
def test_scaled_step_updates_parameters_like_the_bare_optimizer(name):
    case, results = CASES[name], []
    gradients = case.gradients([(8, 8)] * 3)
    true = [(g / steps.SCALE).astype(g.dtype) for g in gradients]
    for make, given in ((steps.bare_step, true), (steps.scaled_step, gradients)):
        mx.random.seed(0)
        step = make(case, given)
        before = step.state[0]["layers"][0]["weight"]
        step.run()
        after = step.state[0]["layers"][0]["weight"]
        assert not mx.array_equal(before, after)
        results.append(after.astype(mx.float32))
    tolerance = 1e-6 if case.dtype == mx.float32 else 1e-4
    if case.compute_dtype is not None:
        tolerance = 2e-4  # the bare gradients were rounded after unscaling
    assert mx.allclose(*results, rtol=1e-3, atol=tolerance)


def test_benchmarks_command_prints_and_writes_the_requested_tables(
    tmp_path, capsys, monkeypatch
):
    rows = [{"case": "AdamW", "parameters": "8 M", "ratio": 1.2}]
    monkeypatch.setattr(steps, "measure", lambda quick: rows)
    file = tmp_path / "results.json"
    assert main(["--quick", "steps", "--json", str(file)]) == 0
    assert json.loads(file.read_text())["tables"] == {"steps": rows}
    assert "AdamW  8 M           1.2" in capsys.readouterr().out


def test_benchmarks_command_refuses_an_unknown_benchmark(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["speed"])
    assert "'speed' is not a benchmark" in capsys.readouterr().err


FIRST_STEP = """
import sys, mlx.core as mx
from benchmarks import steps
step = getattr(steps, sys.argv[1])(steps.Case(), [mx.ones(64)] * 16)
step.run()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="MLX keeps kernels elsewhere.")
def test_first_step_builds_at_most_four_more_kernels_than_a_bare_step(tmp_path):
    built = []
    for name in ("bare_step", "scaled_step"):
        folder = tmp_path / name
        folder.mkdir()
        command = [sys.executable, "-c", FIRST_STEP, name]
        environment = os.environ | {"TMPDIR": str(folder)}
        subprocess.run(command, cwd=ROOT, env=environment, check=True)
        built.append(len(list(folder.rglob("*.so"))))
    assert 0 < built[1] <= built[0] + 4, built
