"""What each release has saved is read by this version, as docs/stability.md promises.

If this fails because a format has changed: keep the old reader. Only for a version that
was never released may its folder be removed and made again, by make_saved.py in there.
"""

from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import pytest
from golden_saved.make_saved import GROWTH_INTERVAL, SCALE, STEPS, make_run, steps
from mlx.utils import tree_flatten, tree_unflatten

from mlx_gradscale import (
    GradScaler,
    __version__,
    float32_layers,
    restore_checkpoint,
)
from mlx_gradscale.convert import load_run
from mlx_gradscale.diagnostics import ScaleHistory

SAVED = Path(__file__).parent / "golden_saved"
VERSIONS = sorted(path for path in SAVED.iterdir() if path.name[0].isdigit())


def test_there_are_files_of_this_version():
    assert SAVED / __version__ in VERSIONS


@pytest.mark.parametrize("folder", VERSIONS, ids=lambda path: path.name)
@pytest.mark.parametrize("suffix", ["json", "pt", "safetensors", "json.gz", "pt.gz"])
def test_the_scaler(folder, suffix):
    scaler = GradScaler()
    scaler.load(folder / f"scaler.{suffix}")
    state = scaler.state_dict()
    assert (scaler.get_scale(), state["growth_interval"]) == (SCALE, GROWTH_INTERVAL)
    assert (state["_growth_tracker"], state["hysteresis"]) == (STEPS, 2)


@pytest.mark.parametrize("folder", VERSIONS, ids=lambda path: path.name)
def test_checkpoint_and_state_go_on_alike(folder):
    unbroken, optimizer = make_run()
    steps(unbroken, optimizer)
    expected = steps(unbroken, optimizer)

    model, optimizer = make_run()
    extra = restore_checkpoint(folder / "checkpoint", model, optimizer)
    assert extra == {"step": STEPS, "note": "kept"}
    weights = model.parameters()
    for found, like in zip(steps(model, optimizer), expected, strict=True):
        assert mx.allclose(found, like, rtol=1e-5, atol=0)

    model, optimizer = make_run()
    model.update(weights)
    optimizer.init(model.trainable_parameters())
    state = mx.load(str(folder / "state.safetensors"))
    optimizer.state = tree_unflatten(list(state.items()))
    for found, like in zip(steps(model, optimizer), expected, strict=True):
        assert mx.allclose(found, like, rtol=1e-5, atol=0)
    assert optimizer.step.item() == 2 * STEPS


@pytest.mark.parametrize("folder", VERSIONS, ids=lambda path: path.name)
def test_run_folder_history_and_layers(folder):
    model = nn.Linear(2, 1)
    run = load_run(folder / "run", model)
    assert run.record.checkpoint["epoch"] == 3
    assert run.scaler.get_scale() == 65536.0
    assert mx.array_equal(model.weight, mx.ones((1, 2)))
    for suffix in ("csv", "jsonl"):
        (record,) = ScaleHistory.load(folder / f"history.{suffix}").records
        assert (record.scale, record.applied, record.loss) == (SCALE, True, 0.5)
    model, _ = make_run()
    layers = float32_layers(model, folder / "float32_layers.json")
    assert layers.paths == ["layers.0"]
    assert len(tree_flatten(model.parameters())) == 4
