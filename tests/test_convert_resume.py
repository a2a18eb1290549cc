"""Half precision runs: what no optimizer trained comes back as it was."""

import shutil

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from convert_helpers import usual

from mlx_gradscale.convert import (
    from_torch,
    load_run,
    read_run,
    save_run,
    to_torch,
    write_run,
)


class Net(nn.Module):
    """A frozen layer, BatchNorm, and a layer that is trained."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.norm = nn.BatchNorm(4)
        self.fc = nn.Linear(4, 2)

    def __call__(self, x):
        return self.fc(self.norm(self.body(x)))


def half(folder, **options):
    model = Net()
    model.set_dtype(mx.float16)
    model.body.freeze()
    model.norm.freeze()
    return model, load_run(folder, model, loss_scaling=True, **options)


def write_start(folder, **weights):
    """A run in which only fc is trained; every number has 24 bits."""
    mx.random.seed(3)
    shapes = {
        "body.weight": (4, 4),
        "body.bias": (4,),
        "norm.weight": (4,),
        "norm.bias": (4,),
        "norm.running_mean": (4,),
        "norm.running_var": (4,),
        "fc.weight": (2, 4),
        "fc.bias": (2,),
    }
    model = {name: mx.random.uniform(0.5, 1.5, s) for name, s in shapes.items()}
    model |= weights
    optimizer = usual()["optimizer"]
    optimizer["state"] = {
        i: {"momentum_buffer": mx.zeros_like(model[name])}
        for i, name in enumerate(("fc.weight", "fc.bias"))
    }
    group = optimizer["param_groups"][0]
    group["params"], group["param_names"] = [0, 1], ["fc.weight", "fc.bias"]
    scaler = usual()["scaler"]  # of 512: the first step is not skipped
    checkpoint = {"model": model, "optimizer": optimizer, "scaler": scaler}
    write_run(folder, from_torch(checkpoint))
    return model


def step(model, optimizer):
    def loss_fn(x):
        return (model(x).astype(mx.float32) ** 2).mean()

    value_and_grad = optimizer.value_and_grad(model, loss_fn)
    _, grads = value_and_grad(mx.random.normal((5, 4)).astype(mx.float16))
    optimizer.update(model, grads)


def same(a, b):
    return a.dtype == b.dtype and np.array_equal(np.array(a), np.array(b))


STAY = ("body.weight", "body.bias", "norm.weight", "norm.bias")
STATISTICS = ("norm.running_mean", "norm.running_var")


@pytest.mark.parametrize("place", ["run", "other"])
def test_what_was_not_trained_comes_back_unrounded(place, tmp_path):
    start = write_start(tmp_path / "run")
    model, resumed = half(tmp_path / "run")
    save_run(tmp_path / place, model, resumed.optimizer, record=resumed.record)
    saved = read_run(tmp_path / place)
    assert all(same(saved.weights[name], start[name]) for name in start)
    assert saved.record.rounded is None

    step(model, resumed.optimizer)
    save_run(tmp_path / place, model, resumed.optimizer, record=resumed.record)
    saved = read_run(tmp_path / place).weights
    assert all(same(saved[name], start[name]) for name in STAY)
    for name in STATISTICS:  # they moved: the model's own value, in their dtype
        now = model.norm[name.split(".")[1]]
        assert same(saved[name], now.astype(mx.float32))
        assert not same(saved[name], start[name])
    assert not same(saved["fc.weight"], start["fc.weight"])


def test_the_record_of_the_folder_does_as_well(tmp_path):
    start = write_start(tmp_path / "run")
    model, resumed = half(tmp_path / "run")
    for _ in range(2):
        step(model, resumed.optimizer)
        save_run(tmp_path / "run", model, resumed.optimizer)
    saved = read_run(tmp_path / "run").weights
    assert all(same(saved[name], start[name]) for name in STAY)


def test_a_weight_that_was_changed_by_hand_is_saved(tmp_path):
    write_start(tmp_path / "run")
    model, resumed = half(tmp_path / "run")
    model.body.weight = mx.full((4, 4), 2, mx.float16)  # frozen
    model.fc.weight = mx.full((2, 4), 3, mx.float16)  # with a master
    save_run(tmp_path / "run", model, resumed.optimizer)
    saved = read_run(tmp_path / "run").weights
    assert same(saved["body.weight"], mx.full((4, 4), 2, mx.float32))
    assert same(saved["fc.weight"], mx.full((2, 4), 3, mx.float32))


def test_a_loss_that_cannot_be_undone_is_told(tmp_path):
    write_start(tmp_path / "run")
    model, resumed = half(tmp_path / "run")
    shutil.rmtree(tmp_path / "run")
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "model.safetensors").write_bytes(b"garbage")
    with pytest.warns(UserWarning, match=r"6 weights .*body.*no longer"):
        save_run(tmp_path / "new", model, resumed.optimizer, record=resumed.record)
    saved = read_run(tmp_path / "new").weights
    assert saved["body.weight"].dtype == mx.float16


@pytest.mark.parametrize("name", ["fc.weight", "norm.running_var"])
def test_a_weight_beyond_float16_is_an_error(name, tmp_path):
    start = write_start(tmp_path / "run")
    write_start(tmp_path / "run2", **{name: start[name] * 1e5})
    model, _ = half(tmp_path / "run")
    before = np.array(model.fc.weight)
    with pytest.raises(ValueError, match=rf"{name} holds .*65504"):
        load_run(tmp_path / "run2", model, loss_scaling=True)
    assert np.array_equal(np.array(model.fc.weight), before)
    model, layer = Net(), name.split(".")[0]
    model.set_dtype(mx.float16)
    model.body.freeze()
    model.norm.freeze()
    model[layer].set_dtype(mx.float32)  # as the error says
    load_run(tmp_path / "run2", model, loss_scaling=True)
    assert np.isfinite(np.array(model[layer][name.split(".")[1]])).all()


def test_infinities_of_the_checkpoint_are_its_own(tmp_path):
    bias = mx.array([1.0, float("inf"), 2.0, float("nan")])
    write_start(tmp_path / "run", **{"norm.bias": bias})
    model, resumed = half(tmp_path / "run")
    assert mx.isinf(model.norm.bias[1]).item()
    save_run(tmp_path / "run", model, resumed.optimizer)
    saved = read_run(tmp_path / "run").weights["norm.bias"]
    assert np.array_equal(np.array(saved), np.array(bias), equal_nan=True)


def test_masters_as_remainders_go_to_pytorch_and_back_as_float32(tmp_path):
    start = write_start(tmp_path / "run")
    found = {}
    for kind in ("float32", "remainder"):
        model, resumed = half(tmp_path / "run", masters=kind)
        # The 24 bits of the file, none of which float16 has a place for.
        full = resumed.optimizer.masters(model.trainable_parameters())
        assert same(full["fc"]["weight"], start["fc.weight"])
        mx.random.seed(4)
        step(model, resumed.optimizer)
        save_run(tmp_path / kind, model, resumed.optimizer, record=resumed.record)
        found[kind] = read_run(tmp_path / kind).weights
    for name, x in found["float32"].items():
        assert same(found["remainder"][name], x), name
    assert not same(found["remainder"]["fc.weight"], start["fc.weight"])
    checkpoint, _ = to_torch(read_run(tmp_path / "remainder"))
    assert same(checkpoint["model"]["fc.weight"], found["float32"]["fc.weight"])
