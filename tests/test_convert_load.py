"""A converted run in a live model: all of it or nothing, both ways."""

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest
from convert_helpers import (
    GOLDEN,
    RUNS,
    Small,
    Transformer,
    forward,
    identical,
    model_flag,
    small,
    usual,
)
from golden_convert.data import TOKENS, batch
from mlx.utils import tree_flatten, tree_map

from mlx_gradscale import torch_checkpoint
from mlx_gradscale.convert import (
    Options,
    from_torch,
    load_optimizer_state,
    load_run,
    read_run,
    save_run,
    write_run,
)


def test_loading_is_all_or_nothing(tmp_path):
    write_run(tmp_path / "run", from_torch(usual()))
    wrong = Small(4)
    before = np.array(wrong.fc.weight)
    with pytest.raises(ValueError, match="shape"):
        load_run(tmp_path / "run", wrong)
    assert np.array_equal(np.array(wrong.fc.weight), before)
    frozen = Small()
    frozen.fc.freeze(keys="bias")
    with pytest.raises(ValueError, match="freeze"):
        load_run(tmp_path / "run", frozen)


def test_another_model_is_told_by_its_parameters(tmp_path):
    """A wrong model was told to freeze parameters it has not."""
    write_run(tmp_path / "run", from_torch(usual()))
    with pytest.raises(ValueError, match="another model") as error:
        load_run(tmp_path / "run", nn.Linear(3, 2))
    assert "model has no fc.bias, fc.weight; the run has no weight" in str(error.value)
    with pytest.raises(ValueError, match=r"fc.weight has shape \(2, 4\) in the model"):
        load_run(tmp_path / "run", Small(4))


@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("run.pt", "--torch-path run.pt --mlx-path run --model"),
        ("my run", "--torch-path 'my run' --mlx-path 'my run-mlx' --model"),
    ],
)
def test_a_file_is_to_be_converted_first(name, command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch_checkpoint.save(name, usual())
    with pytest.raises(ValueError, match="Convert a PyTorch checkpoint first") as error:
        load_run(name, Small())
    assert command in str(error.value)


def half_steps(model, optimizer, steps):
    """Steps of a half-precision model with a LossScaleOptimizer."""

    def loss_fn(x, y):
        logits = model(x).astype(mx.float32).reshape(-1, TOKENS)
        return nn.losses.cross_entropy(logits, y.reshape(-1), reduction="mean")

    value_and_grad = optimizer.value_and_grad(model, loss_fn)
    for number in steps:
        _, grads = value_and_grad(*map(mx.array, batch("transformer", number)))
        optimizer.update(model, grads)


@pytest.mark.parametrize("name", [n for n in RUNS if n.startswith("transformer")])
def test_into_a_loss_scale_optimizer_and_back(name, tmp_path):
    forward(GOLDEN / f"{name}.pt", tmp_path / "run", *model_flag(name))
    full = read_run(tmp_path / "run")
    model = Transformer()
    model.set_dtype(mx.float16)
    run = load_run(tmp_path / "run", model, loss_scaling=True)
    assert run.scaler is run.optimizer.scaler
    assert run.scaler.get_scale() == 512.0
    assert all(x.dtype == mx.float16 for _, x in tree_flatten(model.parameters()))
    masters = run.optimizer.state["masters"]
    assert masters.keys() == full.weights.keys()
    for key, weight in full.weights.items():  # PyTorch's float32, in every bit
        assert mx.array_equal(masters[key], weight)

    # Untouched, it goes back as it came.
    save_run(tmp_path / "run", model, run.optimizer)
    forward(tmp_path / "same.pt", tmp_path / "run")
    want = torch_checkpoint.load(GOLDEN / f"{name}.pt")
    identical(torch_checkpoint.load(tmp_path / "same.pt"), want)

    # Two halves of a run are the whole: nothing is lost between them.
    twin = Transformer()
    twin.set_dtype(mx.float16)
    whole = load_run(tmp_path / "run", twin, loss_scaling=True)
    half_steps(twin, whole.optimizer, range(6))
    half_steps(model, run.optimizer, range(3))
    save_run(tmp_path / "run", model, run.optimizer)
    again = Transformer()
    again.set_dtype(mx.float16)
    rest = load_run(tmp_path / "run", again, loss_scaling=True)
    half_steps(again, rest.optimizer, range(3, 6))
    got, want = (dict(tree_flatten(r.optimizer.state)) for r in (rest, whole))
    assert got.keys() == want.keys()
    for key in want:
        assert mx.array_equal(got[key], want[key]), key


def test_a_loss_scale_optimizer_needs_an_optimizer_state(tmp_path):
    model, _, scaler = small()
    write_run(tmp_path / "run", from_torch({"model": model, "scaler": scaler}))
    with pytest.raises(ValueError, match="no optimizer state"):
        load_run(tmp_path / "run", Small(), loss_scaling=True)


def test_a_loaded_state_reaches_a_compiled_step(tmp_path):
    write_run(tmp_path / "run", from_torch(usual(), options=Options(step=5)))
    model = Small()
    run = load_run(tmp_path / "run", model)
    optimizer = run.optimizer
    state = [model.state, optimizer.state]

    def step(x):
        loss, grads = nn.value_and_grad(model, lambda m, x: m.fc(x).sum())(model, x)
        optimizer.update(model, grads)
        return loss

    compiled = mx.compile(step, inputs=state, outputs=state)
    saved = dict(tree_flatten(optimizer.state))
    compiled(mx.ones((1, 3)))
    assert optimizer.step.item() == 6
    load_optimizer_state(optimizer, saved)
    compiled(mx.ones((1, 3)))
    assert optimizer.step.item() == 6
    with pytest.raises(ValueError, match="too much"):
        load_optimizer_state(optimizer, saved | {"x.v": mx.zeros(1)})


def test_a_state_that_cannot_be_written_to_is_refused_and_left_as_it_was():
    class Keeps(optim.Optimizer):
        def init_single(self, parameter, state):
            state["v"], state["both"] = mx.zeros_like(parameter), (mx.zeros(1),)

    optimizer = Keeps()
    optimizer.init({"w": mx.ones(2)})
    saved = {k: mx.ones_like(v) for k, v in tree_flatten(optimizer.state)}
    with pytest.raises(ValueError, match=r"w\.both\.0 is in a tuple"):
        load_optimizer_state(optimizer, saved)
    assert not optimizer.state["w"]["v"].any().item()


def test_settings_that_pytorch_does_not_have_are_loaded_as_they_were_saved(tmp_path):
    checkpoint = usual()
    group = checkpoint["optimizer"]["param_groups"][0]
    parameters = {k: group[k] for k in ("params", "param_names") if k in group}
    adam = {"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.0}
    adam |= {"amsgrad": False, "maximize": False}
    checkpoint["optimizer"] = {"state": {}, "param_groups": [adam | parameters]}
    write_run(tmp_path, from_torch(checkpoint, options=Options(optimizer="AdamW")))
    model = Small()
    run = load_run(tmp_path, model)
    assert run.optimizer.bias_correction is True
    run.optimizer.bias_correction = False
    save_run(tmp_path, model, run.optimizer, run.scaler, run.record)
    assert load_run(tmp_path, Small()).optimizer.bias_correction is False


def test_a_run_born_in_mlx_says_how_to_load_its_optimizer(tmp_path):
    model, optimizer = Small(), optim.Adam(0.1)
    optimizer.init(model.trainable_parameters())
    optimizer.update(model, tree_map(mx.ones_like, model.trainable_parameters()))
    save_run(tmp_path, model, optimizer)
    other, again = Small(), optim.Adam(0.1)
    with pytest.raises(ValueError, match="load_optimizer_state"):
        load_run(tmp_path, other)
    again.init(other.trainable_parameters())
    load_optimizer_state(again, read_run(tmp_path).optimizer)
    assert again.step.item() == 1
