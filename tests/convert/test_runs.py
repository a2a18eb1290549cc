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
from mlx.utils import tree_flatten
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
    round_trip,
    sgd,
    small_adam,
    small_run,
    take_step,
)

from mlx_gradscale import (
    GradScaler,
    MasterWeightOptimizer,
    restore_checkpoint,
    save_checkpoint,
)
from mlx_gradscale import torch_checkpoint as pt
from mlx_gradscale.convert import (
    ConvertError,
    build_optimizer,
    load_torch,
    save_torch,
)
from mlx_gradscale.convert.command import main

EVERY = pytest.mark.parametrize("name", RUNS)


@EVERY
def test_golden_pytorch_run_round_trips_identically_and_resumes_as_in_pytorch(
    name, tmp_path
):
    model, original = mlx_model(name), GOLDEN / f"{name}.pt"
    run = load_torch(original, model)
    save_torch(tmp_path / "a.pt", model, run.optimizer, run.scaler, like=original)
    identical(pt.load(tmp_path / "a.pt"), pt.load(GOLDEN / f"{name}.pt"))
    if name.startswith("conv"):  # a tied tensor is written once, not twice as a view
        assert pickle_of(tmp_path / "a.pt") == pickle_of(GOLDEN / f"{name}.pt")
    else:
        tied = pt.load(tmp_path / "a.pt")["model"]
        assert tied["head.weight"] is tied["embed.weight"]
    scales = go_on(name, model, run, range(BEFORE, BEFORE + AFTER))
    assert scales == json.loads((GOLDEN / f"{name}.json").read_text())
    edited = pt.load(original)
    edited["epoch"], edited["history"] = 4, [1.0]
    weight = edited["model"]["head.weight"]
    save_torch(tmp_path / "b.pt", model, run.optimizer, run.scaler, like=edited)
    assert edited["model"]["head.weight"] is weight
    back = pt.load(tmp_path / "b.pt")
    compare(back["model"], dict(np.load(GOLDEN / f"{name}.npz")))
    assert (back["epoch"], back["history"]) == (4, [1.0])


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

    model, scaler = mlx_model(name), GradScaler()
    optimizer = build_optimizer(tmp_path / "run")
    extra = restore_checkpoint(tmp_path / "run", model, optimizer, scaler)
    assert extra == ({} if "sgd" in name else {"step": BEFORE - 1})  # one was skipped
    middle = BEFORE + 10
    run = SimpleNamespace(optimizer=optimizer, scaler=scaler)
    scales = go_on(name, model, run, range(BEFORE, middle))
    save_checkpoint(tmp_path / "run", model, optimizer, scaler)
    forward(tmp_path / "back.pt", tmp_path / "run")
    said = capsys.readouterr().err
    assert f"Reading {tmp_path}/run.pt" in said
    assert "these entries are copied from the original: epoch, history" in said

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


def test_run_started_in_mlx_accepts_any_checkpoint_of_the_model_as_original(
    tmp_path, capsys
):
    torch = pytest.importorskip("torch")
    from golden.convert.make import Training

    model, name, like = ConvNet(), "conv_adamw", tmp_path / "like.pt"
    optimizer = optim.AdamW(
        0.01, betas=[0.8, 0.95], weight_decay=0.3, bias_correction=True
    )
    optimizer.init(model.trainable_parameters())
    scaler = GradScaler(init_scale=256.0, growth_interval=4)
    live = SimpleNamespace(optimizer=optimizer, scaler=scaler)
    go_on(name, model, live, range(5))
    theirs = Training("conv", "adamw")
    torch.save(theirs.checkpoint(), like)
    save_checkpoint(tmp_path / "run", model, optimizer, scaler)
    where = paths(tmp_path)
    assert "--like" in fails(capsys, *where)
    assert main([*where, "--like", str(like), *model_flag("conv")]) == 0
    notes = save_torch(tmp_path / "b.pt", model, optimizer, scaler, like=like)
    assert "these entries are copied from" in notes[-1]
    identical(pt.load(tmp_path / "b.pt"), pt.load(tmp_path / "a.pt"))

    theirs.load(torch.load(tmp_path / "b.pt", weights_only=True))
    group = theirs.optimizer.param_groups[0]
    assert (group["betas"], group["weight_decay"]) == ((0.8, 0.95), 0.3)
    scales = go_on(name, model, live, range(5, 25))
    for number in range(5, 25):
        theirs.step(number)
        assert theirs.scale() == scales[number - 5]
    save_torch(tmp_path / "c.pt", model, optimizer, scaler, like=tmp_path / "b.pt")
    compare(pt.load(tmp_path / "c.pt")["model"], theirs.weights())


# The dtype of the moments, and how near weights and moments come back: 16 bits of a
# remainder keep about 26 bits of the weight, and 8 keep 19.
BITS = {
    32: (mx.float32, 0, 0),
    16: (mx.bfloat16, 1e-7, 2.0**-8),
    8: (mx.uint8, 2.0**-10 / 500, 0.15),
}


@pytest.mark.parametrize("state_bits", BITS)
def test_float16_model_with_loss_scaling_converts_back_to_float32(state_bits, tmp_path):
    def half_model():
        model = mlx_model("conv_adamw")
        model.set_dtype(mx.float16)
        return model

    path, model = GOLDEN / "conv_adamw.pt", half_model()
    run = load_torch(path, model, loss_scaling=True, state_bits=state_bits)
    dtype, weights_near, moments_near = BITS[state_bits]
    assert run.optimizer.state["head"]["weight"]["v"].dtype == dtype
    assert model.head.weight.dtype == mx.float16
    assert run.scaler is run.optimizer.scaler
    save_torch(tmp_path / "b.pt", model, run.optimizer, like=path)
    start, back = pt.load(path), pt.load(tmp_path / "b.pt")
    for key, tensor in start["model"].items():
        assert mx.allclose(back["model"][key], tensor, rtol=weights_near, atol=0)
    for key, state in start["optimizer"]["state"].items():
        new = back["optimizer"]["state"][key]["exp_avg_sq"]
        assert new.dtype == mx.float32
        assert mx.allclose(new, state["exp_avg_sq"], rtol=moments_near)
    if state_bits == 32:
        identical(back, start)
    # A converted run that is saved with the wrapper resumes in it, and converts back.
    forward(path, tmp_path / "run", *model_flag("conv_adamw"))
    save_checkpoint(tmp_path / "run", model, run.optimizer)
    again = build_optimizer(tmp_path / "run")
    restore_checkpoint(tmp_path / "run", half_model(), again)
    dtypes = {k: x.dtype for k, x in tree_flatten(run.optimizer.state)}
    assert {k: x.dtype for k, x in tree_flatten(again.state)} == dtypes
    forward(tmp_path / "c.pt", tmp_path / "run")
    for key, tensor in pt.load(tmp_path / "c.pt")["model"].items():
        if "running" not in key and "num" not in key:
            identical(tensor, back["model"][key])


def test_master_weight_optimizer_leaves_the_scaler_state_of_the_original(tmp_path):
    state = GradScaler(1024.0).state_dict()
    pt.save(tmp_path / "a.pt", small_run(scaler=state))
    model = Small()
    optimizer = MasterWeightOptimizer(optim.Adam(0.1, bias_correction=True))
    optimizer.init(model.trainable_parameters())
    save_torch(tmp_path / "b.pt", model, optimizer, like=tmp_path / "a.pt")
    identical(pt.load(tmp_path / "b.pt")["scaler"], state)


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
    checkpoint, head = small_run(), {"head.weight": mx.ones((4, 2))}
    checkpoint["model"] |= head
    optimizer = checkpoint["optimizer"]
    moments = {"step": mx.array(3.0), "exp_avg": mx.ones((4, 2)),
               "exp_avg_sq": mx.ones((4, 2))}  # fmt: skip
    optimizer["state"][2] = moments
    optimizer["param_groups"].append(small_adam()[2] | {"lr": 0.5, "params": [2]})
    back = round_trip(tmp_path, checkpoint, steps=1, drop=("head.*",)).back
    steps = [x["step"].item() for x in back["optimizer"]["state"].values()]
    assert steps == [4, 4, 3]
    identical(back["optimizer"]["state"][2], moments)
    identical(back["model"]["head.weight"], head["head.weight"])


@pytest.mark.parametrize("is_zip", [True, False])
def test_tensors_beside_the_run_come_back_with_their_bytes_and_storages(
    is_zip, tmp_path
):
    torch = pytest.importorskip("torch")
    base = torch.arange(6).to(torch.complex128)
    others = {
        "float8": torch.ones(3).to(torch.float8_e4m3fn),
        "views": [base, base[::2], base.reshape(2, 3).T],
        "parameter": torch.nn.Parameter(torch.ones(2, dtype=torch.float64)),
    }
    weights = {"fc.weight": torch.ones(2, 3), "fc.bias": torch.zeros(2)}
    torch.save(
        {"model": weights, **others},
        tmp_path / "a.pt",
        _use_new_zipfile_serialization=is_zip,
    )
    model = Small()
    load_torch(tmp_path / "a.pt", model)
    model.fc.bias = model.fc.bias + 1
    save_torch(tmp_path / "b.pt", model, like=tmp_path / "a.pt")
    back = torch.load(tmp_path / "b.pt", weights_only=True)
    assert back["model"]["fc.bias"].tolist() == [1, 1]
    assert back["float8"].dtype == torch.float8_e4m3fn
    assert torch.equal(back["float8"].float(), torch.ones(3))
    assert len({view.untyped_storage().data_ptr() for view in back["views"]}) == 1
    for view, want in zip(back["views"], others["views"], strict=True):
        assert torch.equal(view, want)
        assert view.stride() == want.stride()
    assert isinstance(back["parameter"], torch.nn.Parameter)
    assert torch.equal(back["parameter"], others["parameter"])


def test_parameter_frozen_in_mlx_keeps_its_pytorch_moments(tmp_path):
    model = Small()
    model.fc.freeze(keys=["bias"])
    trip = round_trip(tmp_path, small_run(), steps=1, model=model)
    state = trip.back["optimizer"]["state"]
    assert state[0]["step"].item() == 4
    identical(state[1], small_run()["optimizer"]["state"][1])


def test_entries_copied_after_steps_in_mlx_are_reported_unless_the_user_edits_them(
    tmp_path,
):
    more = {"epoch": 3, "best": 0.5, "scheduler": {"last_epoch": 3}}
    model, run, _, (note,) = round_trip(tmp_path, small_run(**more), steps=1)
    assert "not converted: epoch, best, scheduler. " in run.notes[-1]
    assert "original: epoch, best, scheduler. If" in note
    assert "set its last_epoch" in note
    edited = pt.load(tmp_path / "a.pt")
    edited["epoch"], edited["scheduler"]["last_epoch"] = 4, 4
    assert save_torch(tmp_path / "b.pt", model, run.optimizer, like=edited) == []
    # The user's object did not change.
    identical(edited["optimizer"], pt.load(tmp_path / "a.pt")["optimizer"])
    back = pt.load(tmp_path / "b.pt")
    assert (back["epoch"], back["scheduler"]) == (4, {"last_epoch": 4})
    assert back["optimizer"]["state"][0]["step"].item() == 4


def test_failed_save_leaves_the_file_unchanged(tmp_path):
    model, run, *_ = round_trip(tmp_path, small_run())
    path = tmp_path / "a.pt"
    before = path.read_bytes()
    with pytest.raises(TypeError, match="odd"):
        save_torch(path, model, run.optimizer, like=pt.load(path) | {"odd": object()})
    assert path.read_bytes() == before
    save_torch(path, model, run.optimizer, like=path)  # onto itself
    identical(pt.load(path), small_run())


def test_original_needs_the_same_model_but_no_optimizer(tmp_path):
    model, *_ = round_trip(tmp_path, small_run(epoch=3))
    path = tmp_path / "a.pt"
    for other in (Small(4), ConvNet()):
        with pytest.raises(ConvertError, match=r"has shape|no parameter for"):
            save_torch(tmp_path / "b.pt", other, like=path)
    assert save_torch(tmp_path / "b.pt", model, like=path) == [
        "The run has no optimizer, so no optimizer state is written."
    ]
    assert list(pt.load(tmp_path / "b.pt")) == ["model", "epoch"]


def test_checkpoint_that_is_a_tuple_comes_back_and_keeps_its_optimizer(tmp_path):
    trip = round_trip(tmp_path, (*small_adam()[:2], 3), steps=1)
    assert "from the original: 2" in trip.notes[0]
    assert trip.back[1]["state"][0]["step"].item() == 4


def test_tensors_that_mlx_only_rounded_come_back_unrounded(tmp_path):
    """Frozen weights in half precision have no master weights."""
    weights = {"fc.weight": mx.full((2, 3), 1 / 3), "fc.bias": mx.full(2, 0.1)}
    model, *_ = round_trip(tmp_path, {"model": weights})
    model.set_dtype(mx.bfloat16)
    model.fc.bias = model.fc.bias + 1
    save_torch(tmp_path / "b.pt", model, like=tmp_path / "a.pt")
    back = pt.load(tmp_path / "b.pt")["model"]
    identical(back["fc.weight"], weights["fc.weight"])
    assert back["fc.bias"].dtype == mx.float32
    assert back["fc.bias"].tolist() == [1.1015625, 1.1015625]


def test_both_ways_back_write_the_learning_rate_of_the_next_step(tmp_path, capsys):
    round_trip(tmp_path, small_run())
    forward(tmp_path / "a.pt", tmp_path / "run")
    rates, model = [1.0, 1.0, 1.0, 0.5, 0.25, 0.125], Small()
    load_torch(tmp_path / "a.pt", model)
    schedule = lambda step: mx.array(rates[step.item()])  # noqa: E731
    optimizer = build_optimizer(tmp_path / "run", learning_rate=schedule)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        restore_checkpoint(tmp_path / "run", Small(), optimizer)
    take_step(model, optimizer)
    save_torch(tmp_path / "b.pt", model, optimizer, like=tmp_path / "a.pt")
    save_checkpoint(tmp_path / "run", model, optimizer)
    forward(tmp_path / "c.pt", tmp_path / "run")
    for name in ("b.pt", "c.pt"):
        assert rate_in(tmp_path / name) == 0.25
    # Like a checkpoint of an older version, the end of a schedule has no next rate.
    for _ in range(2):
        take_step(model, optimizer)
    save_checkpoint(tmp_path / "run", model, optimizer)
    where = ["--torch-path", f"{tmp_path}/d.pt", "--mlx-path", f"{tmp_path}/run"]
    said = fails(capsys, *where)
    assert "the last step, 0.125, and PyTorch needs" in said
    assert "save it again. To convert anyway" in said
    assert main([*where, "--accept", "learning_rate"]) == 0
    assert rate_in(tmp_path / "d.pt") == 0.125


def rate_in(path):
    return pt.load(path)["optimizer"]["param_groups"][0]["lr"]
