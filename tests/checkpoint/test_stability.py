"""Files that each release saved are read by this version.

If this fails because a format has changed, keep the old reader. Only the folder of a
version that was never released may be removed and made again, by make_saved.py in
tests/golden/saved.
"""

from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import pytest
from golden.saved.make_saved import GROWTH_INTERVAL, SCALE, STEPS, make_run, steps
from mlx.optimizers import Optimizer
from mlx.utils import tree_unflatten

from mlx_gradscale import (
    GradScaler,
    __version__,
    float32_layers,
    restore_checkpoint,
    torch_checkpoint,
)
from mlx_gradscale.convert.command import main as convert
from mlx_gradscale.diagnostics import ScaleHistory

SAVED = Path(__file__).parents[1] / "golden" / "saved"
VERSIONS = sorted(path for path in SAVED.iterdir() if path.name[0].isdigit())
EVERY = pytest.mark.parametrize("folder", VERSIONS, ids=lambda path: path.name)


def test_golden_files_exist_for_the_current_version():
    assert SAVED / __version__ in VERSIONS


@EVERY
@pytest.mark.parametrize("suffix", ["json", "pt", "safetensors", "json.gz", "pt.gz"])
def test_scaler_files_of_every_release_load(folder, suffix):
    scaler = GradScaler()
    scaler.load(folder / f"scaler.{suffix}")
    state = scaler.state_dict()
    assert (scaler.get_scale(), state["growth_interval"]) == (SCALE, GROWTH_INTERVAL)
    assert (state["_growth_tracker"], state["hysteresis"]) == (STEPS, 2)


@EVERY
@pytest.mark.parametrize("source", ["checkpoint", "state.safetensors"])
def test_run_saved_by_every_release_resumes_like_an_uninterrupted_run(folder, source):
    unbroken, optimizer = make_run()
    steps(unbroken, optimizer)
    weights = unbroken.parameters()
    expected = steps(unbroken, optimizer)

    model, optimizer = make_run()
    if source == "checkpoint":
        extra = restore_checkpoint(folder / source, model, optimizer)
        assert extra == {"step": STEPS, "note": "kept"}
    else:
        model.update(weights)
        optimizer.init(model.trainable_parameters())
        state = mx.load(str(folder / source))
        optimizer.state = tree_unflatten(list(state.items()))
    for found, like in zip(steps(model, optimizer), expected, strict=True):
        assert mx.allclose(found, like, rtol=1e-5, atol=0)
    assert optimizer.step.item() == 2 * STEPS


@EVERY
def test_run_converted_by_every_release_converts_back_to_pytorch(folder, tmp_path):
    model, scaler = nn.Linear(2, 1), GradScaler(4.0)
    restore_checkpoint(folder / "run", model, Optimizer(), scaler)
    assert mx.array_equal(model.weight, mx.ones((1, 2)))
    assert scaler.get_scale() == 65536.0
    paths = ["--torch-path", f"{tmp_path}/a.pt", "--mlx-path", f"{folder}/run"]
    assert convert(paths) == 0
    back = torch_checkpoint.load(tmp_path / "a.pt")
    assert (back["epoch"], back["model"]["bias"].tolist()) == (3, [0.0])


@EVERY
def test_history_and_layers_of_every_release_load(folder):
    (record,) = ScaleHistory.load(folder / "history.csv").records
    assert (record.scale, record.applied, record.loss) == (SCALE, True, 0.5)
    model, _ = make_run()
    assert float32_layers(model, folder / "float32_layers.json") == ["layers.0"]
