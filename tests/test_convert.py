"""Whole runs between PyTorch and MLX, by the command, with the numbers compared."""

import json

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from convert_helpers import (
    GOLDEN,
    RUNS,
    ConvNet,
    Small,
    compare,
    forward,
    go_on,
    identical,
    mlx_model,
    model_flag,
)
from golden_convert.data import AFTER, BEFORE

from mlx_gradscale import torch_checkpoint
from mlx_gradscale.convert import (
    from_torch,
    load_run,
    main,
    read_run,
    read_torch,
    save_run,
    to_torch,
)

EVERY = pytest.mark.parametrize("name", RUNS)


@EVERY
def test_a_golden_pytorch_run_goes_on_in_mlx(name, tmp_path):
    """Convert by the command, 20 steps, against PyTorch's own next 20."""
    folder = tmp_path / "run"
    forward(GOLDEN / f"{name}.pt", folder, *model_flag(name))
    assert {p.name for p in folder.iterdir()} == {
        "model.safetensors",
        "optimizer.safetensors",
        "scaler.json",
        "training.json",
    }
    model = mlx_model(name)
    run = load_run(folder, model)
    assert run.record.checkpoint["epoch"] == 3
    scales = go_on(name, model, run, range(BEFORE, BEFORE + AFTER))
    assert scales == json.loads((GOLDEN / f"{name}.json").read_text())

    save_run(folder, model, run.optimizer, run.scaler)
    back, _ = to_torch(read_run(folder))
    compare(back["model"], dict(np.load(GOLDEN / f"{name}.npz")))


@EVERY
def test_there_and_back_is_the_same_checkpoint(name, tmp_path):
    start = torch_checkpoint.load(GOLDEN / f"{name}.pt")
    forward(GOLDEN / f"{name}.pt", tmp_path / "run", *model_flag(name))
    forward(tmp_path / "back.pt", tmp_path / "run")
    back = torch_checkpoint.load(tmp_path / "back.pt")
    identical(back, start)
    if name.startswith("transformer"):
        assert back["model"]["head.weight"] is back["model"]["embed.weight"]


@EVERY
def test_mlx_there_and_back_is_the_same_run(name, tmp_path):
    """MLX -> PyTorch -> MLX, after steps in MLX."""
    forward(GOLDEN / f"{name}.pt", tmp_path / "run", *model_flag(name))
    model = mlx_model(name)
    run = load_run(tmp_path / "run", model)
    go_on(name, model, run, range(BEFORE, BEFORE + 3))
    save_run(tmp_path / "run", model, run.optimizer, run.scaler)
    forward(tmp_path / "there.pt", tmp_path / "run")
    step = str(run.optimizer.step.item())  # PyTorch's SGD keeps no count
    forward(
        tmp_path / "there.pt", tmp_path / "again", *model_flag(name), "--step", step
    )
    before, after = read_run(tmp_path / "run"), read_run(tmp_path / "again")
    identical(dict(sorted(after.weights.items())), dict(sorted(before.weights.items())))
    identical(
        dict(sorted(after.optimizer.items())), dict(sorted(before.optimizer.items()))
    )
    assert after.scaler == before.scaler


@pytest.mark.parametrize("name", [*RUNS, "conv_groups", "transformer_groups"])
def test_a_live_pytorch_run_goes_on_in_mlx_and_back(name, tmp_path):
    """With PyTorch itself: there, 10 steps in MLX, and back with strict loading."""
    torch = pytest.importorskip("torch")
    from golden_convert.make import Training

    theirs = Training(*name.split("_"))
    for number in range(BEFORE):
        theirs.step(number)
    torch.save(theirs.checkpoint(), tmp_path / "run.pt")
    forward(tmp_path / "run.pt", tmp_path / "run", *model_flag(name))
    model = mlx_model(name)
    run = load_run(tmp_path / "run", model)
    middle = BEFORE + 10
    scales = go_on(name, model, run, range(BEFORE, middle))
    save_run(tmp_path / "run", model, run.optimizer, run.scaler)
    forward(tmp_path / "back.pt", tmp_path / "run")

    again = Training(*name.split("_"))
    again.load(torch.load(tmp_path / "back.pt", weights_only=True))
    for number in range(BEFORE, middle):
        theirs.step(number)
        assert scales[number - BEFORE] == theirs.scale()
    for number in range(middle, middle + 20):
        theirs.step(number)
        again.step(number)
        assert again.scale() == theirs.scale()
    compare(again.weights(), theirs.weights())


def test_a_run_born_in_mlx_goes_to_pytorch_like_a_pattern(tmp_path):
    torch = pytest.importorskip("torch")
    from golden_convert.make import Training

    from mlx_gradscale import GradScaler

    mx.random.seed(1)
    model = ConvNet()
    optimizer = mlx_adamw()
    optimizer.init(model.trainable_parameters())
    scaler = GradScaler(init_scale=256.0, growth_interval=4)

    class Live:
        pass

    Live.optimizer, Live.scaler = optimizer, scaler
    go_on("conv_adamw", model, Live, range(5))
    save_run(tmp_path / "run", model, optimizer, scaler)
    theirs = Training("conv", "adamw")
    torch.save(theirs.checkpoint(), tmp_path / "like.pt")

    arguments = ["--torch-path", str(tmp_path / "to.pt"), "--mlx-path"]
    arguments.append(str(tmp_path / "run"))
    assert main(arguments) == 1  # nothing says how PyTorch's side looks
    like = ["--like", str(tmp_path / "like.pt"), *model_flag("conv")]
    assert main([*arguments, *like]) == 0

    theirs.load(torch.load(tmp_path / "to.pt", weights_only=True))
    group = theirs.optimizer.param_groups[0]
    assert (group["betas"], group["weight_decay"]) == ((0.8, 0.95), 0.3)
    scales = go_on("conv_adamw", model, Live, range(5, 25))
    for number in range(5, 25):
        theirs.step(number)
        assert theirs.scale() == scales[number - 5]
    save_run(tmp_path / "run", model, optimizer, scaler, read_record(tmp_path))
    back, _ = to_torch(read_run(tmp_path / "run"))
    compare(back["model"], theirs.weights())


def mlx_adamw():
    import mlx.optimizers as optim

    return optim.AdamW(0.01, betas=[0.8, 0.95], weight_decay=0.3, bias_correction=True)


def read_record(folder):
    checkpoint, _ = read_torch(folder / "to.pt")
    return from_torch(checkpoint, ConvNet()).record


class Apart(nn.Module):
    """What PyTorch ties is two parameters here."""

    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)


@pytest.mark.parametrize("groups", [1, 2])
def test_tied_weights_that_mlx_keeps_apart(groups, tmp_path, capsys):
    torch = pytest.importorskip("torch")

    class Tied(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.emb = torch.nn.Embedding(5, 3)
            self.head = torch.nn.Linear(3, 5, bias=False)
            self.head.weight = self.emb.weight
            self.odd = torch.nn.Parameter(torch.ones(2))

    theirs = Tied()
    rest = {"params": [theirs.odd], "lr": 0.5} if groups == 2 else None
    given = [{"params": [theirs.emb.weight]}, *([rest] if rest else [])]
    optimizer = torch.optim.Adam(given)
    theirs.head(theirs.emb(torch.tensor([1, 2]))).sum().backward()
    optimizer.step()
    start = {"model": theirs.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(start, tmp_path / "a.pt")
    flags = ["--model", f"{__name__}:Apart", "--drop", "odd"]
    forward(tmp_path / "a.pt", tmp_path / "run", *flags)
    assert "different parameters in the MLX model" in capsys.readouterr().err

    model = Apart()
    run = load_run(tmp_path / "run", model)
    moments = read_run(tmp_path / "run").optimizer
    prefix = "states.0." if groups == 2 else ""
    want = optimizer.state[theirs.emb.weight]["exp_avg"].numpy()
    for name in ("emb", "head"):
        assert np.array_equal(np.array(moments[f"{prefix}{name}.weight.m"]), want)

    forward(tmp_path / "b.pt", tmp_path / "run")
    back = torch_checkpoint.load(tmp_path / "b.pt")
    identical(back, torch_checkpoint.load(tmp_path / "a.pt"))
    assert back["model"]["head.weight"] is back["model"]["emb.weight"]

    model.head.weight = model.head.weight + 1
    save_run(tmp_path / "run", model, run.optimizer)
    where = [
        "--torch-path",
        str(tmp_path / "c.pt"),
        "--mlx-path",
        str(tmp_path / "run"),
    ]
    assert main(where) == 1
    assert "one tensor in PyTorch" in capsys.readouterr().err
    assert not (tmp_path / "c.pt").exists()


def test_a_dropped_head_and_its_optimizer_go_on_and_back(tmp_path):
    torch = pytest.importorskip("torch")
    theirs = torch.nn.ModuleDict(
        {"fc": torch.nn.Linear(3, 2), "head": torch.nn.Linear(2, 4)}
    )
    groups = [
        {"params": list(theirs["fc"].parameters())},
        {"params": list(theirs["head"].parameters()), "lr": 0.5},
    ]
    optimizer = torch.optim.AdamW(groups)
    theirs["head"](theirs["fc"](torch.ones(1, 3))).sum().backward()
    optimizer.step()
    start = {"model": theirs.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(start, tmp_path / "a.pt")
    flags = ["--model", f"{__name__}:Small", "--drop", "head.*"]
    forward(tmp_path / "a.pt", tmp_path / "run", *flags)
    model = Small()
    run = load_run(tmp_path / "run", model)
    before = torch_checkpoint.load(tmp_path / "a.pt")
    forward(tmp_path / "same.pt", tmp_path / "run")
    identical(torch_checkpoint.load(tmp_path / "same.pt"), before)

    def loss(m, x):
        return m.fc(x).sum()

    _, grads = nn.value_and_grad(model, loss)(model, mx.ones((1, 3)))
    run.optimizer.update(model, grads)
    save_run(tmp_path / "run", model, run.optimizer)
    forward(tmp_path / "b.pt", tmp_path / "run")
    back = torch.load(tmp_path / "b.pt", weights_only=True)
    theirs.load_state_dict(back["model"], strict=True)
    optimizer.load_state_dict(back["optimizer"])
    assert [s["step"].item() for s in back["optimizer"]["state"].values()] == [
        2,
        2,
        1,
        1,
    ]
