"""What only passes through MLX: the user is told of which step it is."""

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest
from convert_helpers import Small, forward, small, usual
from mlx.utils import tree_flatten

from mlx_gradscale import torch_checkpoint
from mlx_gradscale.convert import (
    Options,
    from_torch,
    load_run,
    read_run,
    save_run,
    to_torch,
    write_run,
)

SCHEDULE = {"last_epoch": 5, "_step_count": 6, "_last_lr": [0.1], "base_lrs": [0.4]}


def checkpoint(**more):
    return usual() | {"scheduler": dict(SCHEDULE), **more}


def write(folder, start, step=5):
    write_run(folder, from_torch(start, options=Options(step=step)))


def train(model, optimizer, steps):
    for _ in range(steps):
        x = mx.ones((1, 3))
        _, grads = nn.value_and_grad(model, lambda m, x: m.fc(x).sum())(model, x)
        optimizer.update(model, grads)


def session(folder, steps):
    """Loads a run, makes steps, and saves it."""
    model = Small()
    run = load_run(folder, model)
    train(model, run.optimizer, steps)
    save_run(folder, model, run.optimizer, run.scaler, run.record)


def notes(folder):
    return [note for note in to_torch(read_run(folder))[1] if "out of date" in note]


def test_the_command_names_what_mlx_left_behind(tmp_path, capsys):
    """PyTorch went on with the learning rates of 3 steps ago, and nobody said so."""
    torch_checkpoint.save(tmp_path / "a.pt", checkpoint())
    forward(tmp_path / "a.pt", tmp_path / "run", "--step", "5")
    said = capsys.readouterr().err
    assert (
        "scheduler: a PyTorch schedule (last_epoch 5, the optimizer at step 5" in said
    )
    assert "load_run(folder, model, learning_rate=" in said
    session(tmp_path / "run", 3)
    forward(tmp_path / "b.pt", tmp_path / "run")
    said = capsys.readouterr().err
    assert "epoch, scheduler: as of step 5, unless it was set since, and the" in said
    assert "the optimizer stands at step 8" in said
    assert "record.checkpoint" in said
    assert "scheduler (last_epoch 5): a learning rate schedule" in said
    back = torch_checkpoint.load(tmp_path / "b.pt")
    assert (back["epoch"], back["scheduler"]) == (3, SCHEDULE)


def test_nothing_is_said_while_the_optimizer_stands_still(tmp_path):
    write(tmp_path / "run", checkpoint())
    session(tmp_path / "run", 0)
    assert notes(tmp_path / "run") == []
    write(tmp_path / "parts", dict(zip(("model", "optimizer"), small(), strict=False)))
    session(tmp_path / "parts", 3)
    assert notes(tmp_path / "parts") == []


def test_what_counts_no_steps_is_not_named(tmp_path):
    """The settings of the script were called out of date at each conversion."""
    constant = {
        "args": {"lr": 0.1, "epochs": 90},
        "model_args": {"width": 3},
        "hyper_parameters": {"depth": 2},
        "arch": "resnet",
        "about": {"version": "2.1", "ema": False, "note": None, "more": []},
    }
    write(tmp_path / "run", checkpoint(**constant, loops={"steps": 4}, state=b"x"))
    session(tmp_path / "run", 1)
    (said,) = notes(tmp_path / "run")
    assert said.startswith("epoch, scheduler, loops, state: as of step 5, ")


def test_places_inside_and_a_checkpoint_without_an_optimizer(tmp_path):
    model, optimizer, _ = small()
    start = {"state": {"net": model, "solver": [optimizer, 7]}, "a": {"b": 1}}
    write(tmp_path / "run", start)
    session(tmp_path / "run", 1)
    assert notes(tmp_path / "run")[0].startswith("state/solver/1, a: as of step 5")

    write(tmp_path / "model", {"model": model, "epoch": 3}, step=None)
    net = Small()
    record = load_run(tmp_path / "model", net).record
    mine = optim.SGD(0.1)
    train(net, mine, 4)
    save_run(tmp_path / "model", net, mine, record=record)
    assert notes(tmp_path / "model")[0].startswith("epoch: as of step 0, ")


def test_one_of_several_groups_that_moved_is_enough(tmp_path):
    start = checkpoint()
    group = start["optimizer"]["param_groups"][0] | {"params": [0]}
    start["optimizer"]["param_groups"] = [group, group | {"params": [1], "lr": 0.3}]
    write(tmp_path / "run", start)
    run = read_run(tmp_path / "run")
    assert notes(tmp_path / "run") == []
    run.optimizer["states.1.step"] = mx.array(2, mx.uint64)  # backwards, too
    said = to_torch(run)[1][-1]
    assert "scheduler: as of step 5, " in said
    assert "the optimizer stands at step 2." in said


def born(folder, keep_settings=True):
    mx.random.seed(1)
    model, optimizer = Small(), optim.SGD(0.1, momentum=0.8)
    optimizer.init(model.trainable_parameters())
    train(model, optimizer, 2)
    save_run(folder, model, optimizer)
    if not keep_settings:
        (folder / "training.json").unlink()
    return dict(tree_flatten(model.parameters()))


@pytest.mark.parametrize("keep_settings", [True, False])
def test_what_is_the_patterns_is_named(keep_settings, tmp_path, capsys):
    """A run born in MLX took the pattern's epoch and schedule for its own."""
    weights = born(tmp_path / "run", keep_settings)
    start = checkpoint()
    start["model"]["odd"] = mx.ones(7)
    start["optimizer"]["param_groups"][0]["initial_lr"] = 0.4
    torch_checkpoint.save(tmp_path / "like.pt", start)
    like = ["--like", str(tmp_path / "like.pt"), "--drop", "odd"]
    forward(tmp_path / "to.pt", tmp_path / "run", *like)
    said = capsys.readouterr().err
    named = "epoch, scheduler, initial_lr in the optimizer's groups, the tensors that"
    if keep_settings:
        assert f"{named} MLX does not have (odd): the pattern's" in said
    else:
        assert "momentum in the optimizer's groups" in said
    assert "out of date" not in said
    assert "scheduler (last_epoch 5): a learning rate schedule" in said
    back = torch_checkpoint.load(tmp_path / "to.pt")
    assert np.array_equal(back["model"]["fc.bias"], weights["fc.bias"])
    momentum = back["optimizer"]["param_groups"][0]["momentum"]
    assert momentum == (0.8 if keep_settings else 0.9)


def test_a_pattern_of_parts_alone_needs_no_word(tmp_path, capsys):
    born(tmp_path / "run")
    start = usual()
    del start["epoch"]
    torch_checkpoint.save(tmp_path / "like.pt", start)
    forward(tmp_path / "to.pt", tmp_path / "run", "--like", str(tmp_path / "like.pt"))
    assert "pattern" not in capsys.readouterr().err
