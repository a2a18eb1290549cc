"""Whole runs between PyTorch and MLX, with the numbers compared."""

import json
import warnings
import zipfile
from types import SimpleNamespace

import mlx.core as mx
import mlx.optimizers as optim
import numpy as np
import pytest
from golden.convert.data import AFTER, BEFORE
from support.convert_runs import (
    GOLDEN,
    RUNS,
    ConvNet,
    Small,
    compare,
    fails,
    forward,
    go_on,
    identical,
    mlx_model,
    model_flag,
    paths,
    sgd,
    small_adam,
    small_run,
    take_step,
)

from mlx_gradscale import GradScaler, restore_checkpoint, save_checkpoint
from mlx_gradscale import torch_checkpoint as pt
from mlx_gradscale.convert import (
    ConvertError,
    Options,
    build_optimizer,
    load_torch,
    main,
    save_torch,
)

EVERY = pytest.mark.parametrize("name", RUNS)


@EVERY
def test_golden_pytorch_run_round_trips_identically_and_resumes_as_in_pytorch(
    name, tmp_path
):
    model = mlx_model(name)
    run = load_torch(GOLDEN / f"{name}.pt", model)
    save_torch(tmp_path / "a.pt", model, run.optimizer, run.scaler, like=run.template)
    identical(pt.load(tmp_path / "a.pt"), pt.load(GOLDEN / f"{name}.pt"))
    if name.startswith("conv"):  # a tied tensor is written once, not twice as a view
        assert pickle_of(tmp_path / "a.pt") == pickle_of(GOLDEN / f"{name}.pt")
    else:
        tied = pt.load(tmp_path / "a.pt")["model"]
        assert tied["head.weight"] is tied["embed.weight"]
    assert run.template["epoch"] == 3
    scales = go_on(name, model, run, range(BEFORE, BEFORE + AFTER))
    assert scales == json.loads((GOLDEN / f"{name}.json").read_text())
    run.template["epoch"] = 4
    run.template["history"] = [1.0]
    save_torch(tmp_path / "b.pt", model, run.optimizer, run.scaler, like=run.template)
    back = pt.load(tmp_path / "b.pt")
    compare(back["model"], dict(np.load(GOLDEN / f"{name}.npz")))
    assert back["epoch"] == 4


def pickle_of(path):
    with zipfile.ZipFile(path) as archive:
        (name,) = [n for n in archive.namelist() if n.endswith("/data.pkl")]
        return archive.read(name)


@pytest.mark.parametrize("name", [*RUNS, "conv_groups", "transformer_groups"])
def test_live_pytorch_run_resumes_in_mlx_and_then_in_pytorch(name, tmp_path, capsys):
    torch = pytest.importorskip("torch")
    from golden.convert.make import Training

    theirs = Training(*name.split("_"))
    for number in range(BEFORE):
        theirs.step(number)
    torch.save(theirs.checkpoint(), tmp_path / "run.pt")
    forward(tmp_path / "run.pt", tmp_path / "run", *model_flag(name))
    (tmp_path / "run.pt").unlink()  # the template is enough

    model, scaler = mlx_model(name), GradScaler()
    optimizer = build_optimizer(tmp_path / "run")
    extra = restore_checkpoint(tmp_path / "run", model, optimizer, scaler)
    assert extra == ({} if "sgd" in name else {"step": BEFORE - 1})  # one was skipped
    middle = BEFORE + 10
    run = SimpleNamespace(optimizer=optimizer, scaler=scaler)
    scales = go_on(name, model, run, range(BEFORE, middle))
    save_checkpoint(tmp_path / "run", model, optimizer, scaler)
    forward(tmp_path / "back.pt", tmp_path / "run")
    assert "these entries are copied from the" in capsys.readouterr().err

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


def test_run_started_in_mlx_accepts_any_checkpoint_of_the_model_as_template(
    tmp_path, capsys
):
    torch = pytest.importorskip("torch")
    from golden.convert.make import Training

    model, name = ConvNet(), "conv_adamw"
    optimizer = optim.AdamW(
        0.01, betas=[0.8, 0.95], weight_decay=0.3, bias_correction=True
    )
    optimizer.init(model.trainable_parameters())
    scaler = GradScaler(init_scale=256.0, growth_interval=4)
    live = SimpleNamespace(optimizer=optimizer, scaler=scaler)
    go_on(name, model, live, range(5))
    theirs = Training("conv", "adamw")
    torch.save(theirs.checkpoint(), tmp_path / "like.pt")
    save_checkpoint(tmp_path / "run", model, optimizer, scaler)

    where = paths(tmp_path)
    assert "--like" in fails(capsys, *where)
    like = ["--like", str(tmp_path / "like.pt")]
    assert main([*where, *like, *model_flag("conv")]) == 0
    with pytest.warns(UserWarning, match="these entries are copied from"):
        save_torch(
            tmp_path / "b.pt", model, optimizer, scaler, like=tmp_path / "like.pt"
        )
    identical(pt.load(tmp_path / "b.pt"), pt.load(tmp_path / "a.pt"))

    theirs.load(torch.load(tmp_path / "b.pt", weights_only=True))
    group = theirs.optimizer.param_groups[0]
    assert (group["betas"], group["weight_decay"]) == ((0.8, 0.95), 0.3)
    scales = go_on(name, model, live, range(5, 25))
    for number in range(5, 25):
        theirs.step(number)
        assert theirs.scale() == scales[number - 5]
    with pytest.warns(UserWarning, match="epoch"):
        save_torch(tmp_path / "c.pt", model, optimizer, scaler, like=tmp_path / "b.pt")
    compare(pt.load(tmp_path / "c.pt")["model"], theirs.weights())


@pytest.mark.parametrize("state_bits", [32, 16])
def test_float16_model_with_loss_scaling_converts_back_to_float32(state_bits, tmp_path):
    name = "conv_adamw"
    start = pt.load(GOLDEN / f"{name}.pt")
    model = mlx_model(name)
    model.set_dtype(mx.float16)
    path = GOLDEN / f"{name}.pt"
    run = load_torch(path, model, loss_scaling=True, state_bits=state_bits)
    dtype = {32: mx.float32, 16: mx.bfloat16}[state_bits]
    assert run.optimizer.state["head"]["weight"]["v"].dtype == dtype
    assert model.head.weight.dtype == mx.float16
    assert run.scaler is run.optimizer.scaler
    save_torch(tmp_path / "b.pt", model, run.optimizer, like=run.template)
    back = pt.load(tmp_path / "b.pt")
    if state_bits == 32:
        identical(back, start)
    else:  # 16 bits of a remainder keep about 26 bits of the weight
        for key, tensor in start["model"].items():
            np.testing.assert_allclose(
                np.array(back["model"][key]), np.array(tensor), rtol=1e-7
            )
        for key, state in start["optimizer"]["state"].items():
            new = back["optimizer"]["state"][key]["exp_avg_sq"]
            assert new.dtype == state["exp_avg_sq"].dtype == mx.float32
            assert mx.allclose(new, state["exp_avg_sq"], rtol=2.0**-8)
    # Through a checkpoint of ours, too.
    save_checkpoint(tmp_path / "run", model, run.optimizer)
    forward(GOLDEN / f"{name}.pt", tmp_path / "there", *model_flag(name))
    (tmp_path / "there/template.pt").rename(tmp_path / "run/template.pt")
    assert (tmp_path / "run/template.pt").stat().st_size < 9_000
    forward(tmp_path / "c.pt", tmp_path / "run")
    trained = [k for k in start["model"] if "running" not in k and "num" not in k]
    for key in trained:
        identical(pt.load(tmp_path / "c.pt")["model"][key], back["model"][key])


def test_weight_that_overflows_in_half_precision_is_an_error(tmp_path):
    weights = {"fc.weight": mx.full((2, 3), 1e6), "fc.bias": mx.zeros(2)}
    optimizer = {"state": {}, "param_groups": [sgd([0, 1])]}
    pt.save(tmp_path / "a.pt", {"model": weights, "optimizer": optimizer})
    model = Small()
    model.set_dtype(mx.float16)
    before = mx.array(model.fc.weight)
    with pytest.raises(ConvertError, match=r"overflow in .*: fc\.weight"):
        load_torch(tmp_path / "a.pt", model, loss_scaling=True)
    assert mx.array_equal(model.fc.weight, before)


def test_dropped_head_and_its_moments_come_back_unchanged(tmp_path):
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
    model = Small()
    run = load_torch(tmp_path / "a.pt", model, Options(drop=("head.*",)))
    take_step(model, run.optimizer)
    save_torch(tmp_path / "b.pt", model, run.optimizer, like=run.template)
    back = torch.load(tmp_path / "b.pt", weights_only=True)
    theirs.load_state_dict(back["model"], strict=True)
    optimizer.load_state_dict(back["optimizer"])
    steps = [s["step"].item() for s in back["optimizer"]["state"].values()]
    assert steps == [2, 2, 1, 1]


def test_parameter_frozen_in_mlx_keeps_its_pytorch_moments(tmp_path):
    small_run(tmp_path)
    model = Small()
    model.fc.freeze(keys=["bias"])
    run = load_torch(tmp_path / "a.pt", model)
    take_step(model, run.optimizer)
    save_torch(tmp_path / "b.pt", model, run.optimizer, like=run.template)
    state = pt.load(tmp_path / "b.pt")["optimizer"]["state"]
    assert state[0]["step"].item() == 4
    identical(state[1], pt.load(tmp_path / "a.pt")["optimizer"]["state"][1])


def test_entries_copied_after_steps_in_mlx_are_reported_until_they_are_set(tmp_path):
    more = {"epoch": 3, "best": 0.5, "scheduler": {"last_epoch": 3}}
    model, run = small_run(tmp_path, **more)
    assert any("is not converted" in note for note in run.notes)
    take_step(model, run.optimizer)
    run.template["epoch"] = 4
    with pytest.warns(UserWarning, match=r": best, scheduler\. .* set its last_epoch"):
        notes = save_torch(tmp_path / "b.pt", model, run.optimizer, like=run.template)
    assert "epoch," not in notes[0]
    take_step(model, run.optimizer)
    run.template["best"] = 0.4
    run.template["scheduler"] |= {"last_epoch": 5}
    assert save_torch(tmp_path / "b.pt", model, run.optimizer, like=run.template) == []
    back = pt.load(tmp_path / "b.pt")
    assert (back["epoch"], back["scheduler"]) == (4, {"last_epoch": 5})
    assert back["optimizer"]["state"][0]["step"].item() == 5


def test_failed_save_changes_neither_the_template_nor_the_file(tmp_path):
    model, run = small_run(tmp_path)
    run.template["odd"] = object()
    with pytest.raises(TypeError, match="odd"):
        save_torch(tmp_path / "a.pt", model, run.optimizer, like=run.template)
    del run.template.checkpoint["odd"]
    save_torch(tmp_path / "b.pt", model, run.optimizer, like=run.template)
    assert pickle_of(tmp_path / "a.pt") == pickle_of(tmp_path / "b.pt")


def test_template_needs_its_model_but_no_optimizer(tmp_path):
    model, run = small_run(tmp_path, epoch=3)
    for other in (Small(4), ConvNet()):
        with pytest.raises(ConvertError, match=r"differ in fc.*same model"):
            save_torch(tmp_path / "b.pt", other, like=run.template)
    assert save_torch(tmp_path / "b.pt", model, like=run.template) == [
        "The run has no optimizer, so no optimizer state is written."
    ]
    assert list(pt.load(tmp_path / "b.pt")) == ["model", "epoch"]
    assert list(run.template.checkpoint) == ["model", "optimizer", "epoch"]


def test_checkpoint_that_is_a_tuple_comes_back_and_keeps_its_optimizer(tmp_path):
    weights, optimizer, _ = small_adam()
    pt.save(tmp_path / "a.pt", (weights, optimizer, 3))
    model = Small()
    run = load_torch(tmp_path / "a.pt", model)
    take_step(model, run.optimizer)
    with pytest.warns(UserWarning, match="from the template: 2"):
        save_torch(tmp_path / "b.pt", model, run.optimizer, like=run.template)
    assert pt.load(tmp_path / "b.pt")[1]["state"][0]["step"].item() == 4
    with pytest.raises(ConvertError, match="Pass the optimizer"):
        save_torch(tmp_path / "b.pt", model, like=run.template)


def test_both_ways_back_write_the_learning_rate_of_the_next_step(tmp_path, capsys):
    small_run(tmp_path)
    forward(tmp_path / "a.pt", tmp_path / "run")
    rates, model = [1.0, 1.0, 1.0, 0.5, 0.25, 0.125], Small()
    run = load_torch(tmp_path / "a.pt", model)
    schedule = lambda step: mx.array(rates[step.item()])  # noqa: E731
    optimizer = build_optimizer(tmp_path / "run", learning_rate=schedule)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        restore_checkpoint(tmp_path / "run", Small(), optimizer)
    take_step(model, optimizer)
    notes = save_torch(tmp_path / "b.pt", model, optimizer, like=run.template)
    assert "its value for the next step: 0.25" in notes[0]
    save_checkpoint(tmp_path / "run", model, optimizer)
    forward(tmp_path / "c.pt", tmp_path / "run")
    for name in ("b.pt", "c.pt"):
        assert pt.load(tmp_path / name)["optimizer"]["param_groups"][0]["lr"] == 0.25
    # Like a checkpoint of an older version, the end of a schedule has no next rate.
    for _ in range(2):
        take_step(model, optimizer)
    save_checkpoint(tmp_path / "run", model, optimizer)
    where = ["--torch-path", f"{tmp_path}/d.pt", "--mlx-path", f"{tmp_path}/run"]
    said = fails(capsys, *where)
    assert "the last step, 0.125, and PyTorch needs" in said
    assert "save it again. To convert anyway" in said
    assert main([*where, "--accept", "learning_rate"]) == 0
    assert pt.load(tmp_path / "d.pt")["optimizer"]["param_groups"][0]["lr"] == 0.125
