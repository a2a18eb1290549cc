"""Whole runs between PyTorch and MLX, by the command, with the numbers compared."""

import json
import os
import subprocess
import sys
import tempfile
from collections import OrderedDict
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from golden_convert.data import (
    AFTER,
    BEFORE,
    CLASSES,
    LENGTH,
    OVERFLOWS,
    TOKENS,
    WIDTH,
    batch,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx.utils import tree_flatten

from mlx_gradscale import torch_checkpoint
from mlx_gradscale.convert import (
    Choices,
    Options,
    from_torch,
    load_optimizer_state,
    load_run,
    main,
    read_run,
    read_torch,
    save_run,
    text,
    to_torch,
    write_run,
)
from mlx_gradscale.convert.jsonable import decode, encode
from mlx_gradscale.convert.order import OrderError, parameter_names
from mlx_gradscale.convert.parts import PartsError, Unordered, find_parts
from mlx_gradscale.layouts import make_plan
from mlx_gradscale.torch_optimizers import ROWS

GOLDEN = Path(__file__).parent / "golden_convert"
RUNS = [f"{k}_{o}" for k in ("conv", "transformer") for o in ("adam", "adamw", "sgd")]
EVERY = pytest.mark.parametrize("name", RUNS)

# Both sides compute in float32 and add up in another order. The gradients of such
# small nets differ by some 1e-7 relative, Adam's bias correction by up to 6e-6 (MLX's
# is float32), and 20 steps through BatchNorm or attention multiply that by about ten;
# the weights are of order 1. Measured: 4e-6 at most.
TOLERANCE = {"rtol": 2e-5, "atol": 2e-5}


class ConvNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(2, 4, 3, bias=False),
            nn.BatchNorm(4),
            nn.ReLU(),
            nn.Conv2d(4, 6, 3, stride=2, bias=False),
            nn.BatchNorm(6),
            nn.Tanh(),
        )
        self.up = nn.ConvTranspose2d(6, 4, 3, stride=2)
        self.head = nn.Linear(4, CLASSES)

    def __call__(self, x):
        return self.head(self.up(self.features(x)).mean((1, 2)))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH)
        self.attention = nn.MultiHeadAttention(WIDTH, 2)
        self.norm2 = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 2 * WIDTH), nn.ReLU(), nn.Linear(2 * WIDTH, WIDTH)
        )

    def __call__(self, x, mask):
        y = self.norm1(x)
        x = x + self.attention(y, y, y, mask)
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(TOKENS, WIDTH)
        self.position = mx.zeros((1, LENGTH, WIDTH))
        self.blocks = [Block()]
        self.norm = nn.LayerNorm(WIDTH)

    def __call__(self, x):
        x = self.embed(x) + self.position
        mask = nn.MultiHeadAttention.create_additive_causal_mask(LENGTH, x.dtype)
        for block in self.blocks:
            x = block(x, mask)
        return self.embed.as_linear(self.norm(x))


MODELS = {"conv": ConvNet, "transformer": Transformer}


def mlx_model(name):
    return MODELS[name.split("_")[0]]()


def model_flag(name):
    return ["--model", f"{__name__}:{MODELS[name.split('_')[0]].__name__}"]


def go_on(name, model, run, steps):
    """MLX's own steps; the scale and tracker after each."""
    kind, scales = name.split("_")[0], []

    def loss_fn(model, x, y, factor):
        logits = model(x)
        logits = logits.reshape(-1, logits.shape[-1])
        return nn.losses.cross_entropy(logits, y.reshape(-1), reduction="mean") * factor

    value_and_grad = run.scaler.value_and_grad(model, loss_fn)
    for number in steps:
        x, y = map(mx.array, batch(kind, number))
        factor = float("inf") if number in OVERFLOWS else 1.0
        _, grads = value_and_grad(model, x, y, factor)
        run.scaler.minimize(run.optimizer, model, grads)
        state = run.scaler.state_dict()
        scales.append([state["scale"], state["_growth_tracker"]])
    return scales


def compare(weights, want):
    assert weights.keys() == want.keys()
    for key, value in want.items():
        if key.endswith("num_batches_tracked"):
            continue  # MLX has none
        np.testing.assert_allclose(
            np.array(weights[key]), value, **TOLERANCE, err_msg=key
        )


def forward(torch_path, mlx_path, *flags):
    assert (
        main(["--torch-path", str(torch_path), "--mlx-path", str(mlx_path), *flags])
        == 0
    )


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
    assert run.record["checkpoint"]["epoch"] == 3
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


def identical(a, b):
    assert type(a) is type(b)
    if isinstance(a, mx.array):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert np.array(a).tobytes() == np.array(b).tobytes()
    elif isinstance(a, dict):
        assert list(a) == list(b)
        assert getattr(a, "_metadata", None) == getattr(b, "_metadata", None)
        for key in a:
            identical(a[key], b[key])
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            identical(x, y)
    else:
        assert a == b


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


# Shapes of checkpoints -------------------------------------------------------------


def small(seed=0):
    """A little state dict with an SGD state and a scaler state, as plain objects."""
    weight = mx.arange(6, dtype=mx.float32).reshape(2, 3) + seed
    model = OrderedDict({"fc.weight": weight, "fc.bias": mx.array([1.0, 2.0])})
    optimizer = {
        "state": {
            0: {"momentum_buffer": weight * 2},
            1: {"momentum_buffer": mx.array([3.0, 4.0])},
        },
        "param_groups": [
            {
                "lr": 0.1,
                "momentum": 0.9,
                "dampening": 0,
                "weight_decay": 0,
                "nesterov": False,
                "params": [0, 1],
            }
        ],
    }
    scaler = {
        "scale": 512.0,
        "growth_factor": 2.0,
        "backoff_factor": 0.5,
        "growth_interval": 2000,
        "_growth_tracker": 7,
    }
    return model, optimizer, scaler


def shapes_of_checkpoints():
    model, optimizer, scaler = small()
    return {
        "usual": {"model": model, "optimizer": optimizer, "scaler": scaler, "epoch": 3},
        "other names": {"net": model, "opt": optimizer, "amp": scaler, "best": 0.5},
        "nested": {"state": {"net": model, "solver": [optimizer]}, "amp": scaler},
        "lightning": {
            "epoch": 1,
            "global_step": 70,
            "pytorch-lightning_version": "2.5.0",
            "state_dict": model,
            "loops": {"fit_loop": {"state_dict": {}, "epoch_progress": {"n": 1}}},
            "callbacks": {"ModelCheckpoint{'monitor': None}": {"best": ""}},
            "optimizer_states": [optimizer],
            "lr_schedulers": [{"last_epoch": 3, "base_lrs": [0.1]}],
            "MixedPrecision": scaler,
            "hparams": {"lr": 0.1},
        },
    }


@pytest.mark.parametrize("kind", shapes_of_checkpoints())
def test_checkpoints_of_any_shape_go_there_and_back(kind, tmp_path):
    checkpoint = shapes_of_checkpoints()[kind]
    torch_checkpoint.save(tmp_path / "a.pt", checkpoint)
    forward(tmp_path / "a.pt", tmp_path / "run")
    run = read_run(tmp_path / "run")
    assert run.weights.keys() == {"fc.weight", "fc.bias"}
    assert run.optimizer["fc.bias.v"].tolist() == [3.0, 4.0]
    assert run.scaler["scale"] == 512.0
    forward(tmp_path / "b.pt", tmp_path / "run")
    identical(torch_checkpoint.load(tmp_path / "b.pt"), checkpoint)


def test_a_bare_state_dict_and_a_bare_scaler(tmp_path):
    model, _, scaler = small()
    torch_checkpoint.save(tmp_path / "m.pt", model)
    forward(tmp_path / "m.pt", tmp_path / "m")
    forward(tmp_path / "m2.pt", tmp_path / "m")
    identical(torch_checkpoint.load(tmp_path / "m2.pt"), model)
    torch_checkpoint.save(tmp_path / "s.pt", scaler)
    forward(tmp_path / "s.pt", tmp_path / "s")
    assert read_run(tmp_path / "s").scaler == scaler
    forward(tmp_path / "s2.pt", tmp_path / "s")
    identical(torch_checkpoint.load(tmp_path / "s2.pt"), scaler)


def test_a_folder_as_accelerate_writes_it(tmp_path, capsys):
    model, optimizer, scaler = small()
    source = tmp_path / "checkpoint-70"
    source.mkdir()
    mx.save_safetensors(
        str(source / "model.safetensors"), dict(model), {"format": "pt"}
    )
    torch_checkpoint.save(source / "optimizer.bin", optimizer)
    torch_checkpoint.save(source / "scheduler.bin", {"last_epoch": 70})
    torch_checkpoint.save(source / "scaler.pt", scaler)
    (source / "random_states_0.pkl").write_bytes(b"not read")
    forward(source, tmp_path / "run")
    said = capsys.readouterr().err
    assert "random_states_0.pkl" in said
    assert "scheduler.bin" in said
    forward(tmp_path / "back", tmp_path / "run")
    back, _ = read_torch(tmp_path / "back")
    want, _ = read_torch(source)
    assert sorted(back) == sorted(want)
    for key in want:
        if key == "model.safetensors":
            identical(dict(sorted(back[key].items())), dict(sorted(want[key].items())))
        else:
            identical(back[key], want[key])


def test_a_real_accelerate_like_folder_loads_in_pytorch(tmp_path):
    torch = pytest.importorskip("torch")
    layer = torch.nn.Linear(3, 2)
    optimizer = torch.optim.Adam(layer.named_parameters())
    layer(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    (tmp_path / "in").mkdir()
    torch.save(layer.state_dict(), tmp_path / "in" / "pytorch_model.bin")
    torch.save(optimizer.state_dict(), tmp_path / "in" / "optimizer.bin")
    forward(tmp_path / "in", tmp_path / "run")
    forward(tmp_path / "out", tmp_path / "run")
    layer.load_state_dict(torch.load(tmp_path / "out" / "pytorch_model.bin"))
    optimizer.load_state_dict(torch.load(tmp_path / "out" / "optimizer.bin"))


def test_parts_are_told_apart_or_named():
    model, optimizer, _ = small()
    assert find_parts({"model": model, "ema": model}) == {"model": ("model",)}
    two = {"a": model, "b": model}
    with pytest.raises(PartsError, match="--model-key, one of a, b"):
        find_parts(two)
    assert find_parts(two, {"model": "b"}) == {"model": ("b",)}
    several = {"model": model, "optimizers": [optimizer, optimizer]}
    with pytest.raises(PartsError, match="optimizers/0, optimizers/1"):
        find_parts(several)
    found = find_parts(several, {"optimizer": "optimizers/1"})
    assert found["optimizer"] == ("optimizers", 1)
    assert "optimizer" not in find_parts(several, {"optimizer": ""})
    with pytest.raises(PartsError, match="no 'c' in"):
        find_parts(two, {"model": "c"})
    with pytest.raises(PartsError, match="no scaler state"):
        find_parts(two, {"model": "a", "scaler": "b"})
    with pytest.raises(PartsError, match="no model, optimizer or scaler"):
        find_parts({"epoch": 3})
    rng = {"cpu": mx.zeros(10, mx.uint8)}
    assert find_parts({"model": model, "rng": rng}) == {"model": ("model",)}


def test_what_is_not_converted_stays_for_the_way_back(tmp_path):
    model, optimizer, _ = small()
    checkpoint = {
        "model": model,
        "generator": optimizer,
        "discriminator": optimizer,
        "ema": {"fc.weight": mx.ones((2, 3)), "fc.bias": mx.zeros(2)},
        "odd": (1, {2: b"x", "y": {3.5}}, None, float("inf"), 1 + 2j),
        "rng": mx.arange(100, dtype=mx.uint8),
    }
    torch_checkpoint.save(tmp_path / "a.pt", checkpoint)
    forward(tmp_path / "a.pt", tmp_path / "run", "--optimizer-key", "generator")
    assert (tmp_path / "run" / "extra.safetensors").exists()
    forward(tmp_path / "b.pt", tmp_path / "run")
    identical(torch_checkpoint.load(tmp_path / "b.pt"), checkpoint)


plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary()
    | st.complex_numbers(allow_nan=False),
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.text() | st.integers() | st.booleans(), inner)
        | st.dictionaries(st.text(), inner).map(OrderedDict)
        | st.sets(st.integers())
    ),
    max_leaves=20,
)


@settings(deadline=None, max_examples=100)
@given(plain)
def test_json_keeps_every_plain_value(value):
    text = json.dumps(encode(value, {}), allow_nan=False)
    back = decode(json.loads(text), {})
    assert back == value
    assert type(back) is type(value)


@settings(deadline=None, max_examples=30)
@given(
    st.sampled_from(
        [mx.float32, mx.bfloat16, mx.float16, mx.int64, mx.uint8, mx.bool_]
    ),
    st.lists(st.integers(0, 5), max_size=3),
)
def test_json_keeps_every_tensor(dtype, shape):
    value = mx.arange(int(np.prod(shape))).reshape(shape).astype(dtype)
    tensors = {}
    text = json.dumps(encode({"x": [value]}, tensors))
    back = decode(json.loads(text), tensors)["x"][0]
    assert (back.dtype, back.shape) == (value.dtype, value.shape)
    assert mx.array_equal(back, value)


_MORE = {"maximize": False, "foreach": None, "params": []}
GROUPS = {  # as torch 2.13 writes them
    "Adam": {"lr": 0.001, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0,
             "amsgrad": False, "decoupled_weight_decay": False},
    "AdamW": {"lr": 0.003, "betas": (0.8, 0.99), "eps": 1e-8, "weight_decay": 0.01,
              "amsgrad": False, "decoupled_weight_decay": True},
    "SGD": {"lr": 0.1, "momentum": 0.9, "dampening": 0, "weight_decay": 0.1,
            "nesterov": True},
    "RMSprop": {"lr": 0.01, "momentum": 0, "alpha": 0.99, "eps": 1e-8,
                "centered": False, "weight_decay": 0},
    "Adagrad": {"lr": 0.01, "lr_decay": 0.3, "eps": 1e-10, "weight_decay": 0,
                "initial_accumulator_value": 0},
    "Adadelta": {"lr": 1.0, "rho": 0.9, "eps": 1e-6, "weight_decay": 0},
    "Adamax": {"lr": 0.002, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0},
    "Lion": {"lr": 0.002, "betas": (0.9, 0.99), "weight_decay": 0.1},
}  # fmt: skip


@st.composite
def checkpoints(draw):
    """A state dict of nested names and any layouts, with an optimizer's state."""
    shapes = draw(
        st.dictionaries(
            st.from_regex(r"[a-c](\.[0-3])?\.[w-z]", fullmatch=True),
            st.lists(st.integers(1, 4), min_size=1, max_size=5),
            min_size=1,
            max_size=6,
        )
    )
    rng = np.random.default_rng(draw(st.integers(0, 100)))

    def array(shape):
        return mx.array(rng.normal(size=shape).astype(np.float32))

    model = OrderedDict((name, array(shape)) for name, shape in shapes.items())
    kind = draw(st.sampled_from(sorted(GROUPS)))
    row = ROWS[kind]
    counted = {"step": mx.array(7.0)} if row.counts else {}
    state = {
        i: counted | {slot: array(shape) for slot in row.slots}
        for i, shape in enumerate(shapes.values())
    }
    cut = draw(st.integers(0, len(shapes)))
    names = list(shapes)
    groups = []
    for part, lr in ((range(cut), 0.5), (range(cut, len(names)), None)):
        group = {**_MORE, **GROUPS[kind], "params": list(part)}
        group["param_names"] = [names[i] for i in part]
        if lr is not None and draw(st.booleans()):
            group["lr"] = lr
        groups.append(group)
    optimizer = {"state": state, "param_groups": groups}
    deep = [name for name, shape in shapes.items() if len(shape) > 2]
    layouts = {name: draw(st.sampled_from(["conv", "conv_transpose", "keep"]))
               for name in deep}  # fmt: skip
    chosen = {kind: tuple(n for n in deep if layouts[n] == kind)
              for kind in ("conv", "conv_transpose", "keep")}  # fmt: skip
    return {"net": model, "opt": optimizer, "n": 1}, Options(Choices(**chosen))


@settings(deadline=None, max_examples=60)
@given(checkpoints())
def test_any_model_and_optimizer_there_and_back(drawn):
    checkpoint, options = drawn
    with tempfile.TemporaryDirectory() as folder:
        write_run(folder, from_torch(checkpoint, options=options))
        run = read_run(folder)
        back, _ = to_torch(run)
        identical(back, checkpoint)


def test_json_tells_tensors_of_one_name_apart():
    big = [mx.full(20, i) for i in range(3)]
    value = {"a.b": big[0], "a": {"b": big[1], "c": big[0]}, "d": big[2]}
    tensors = {}
    back = decode(json.loads(json.dumps(encode(value, tensors, "x"))), tensors)
    assert mx.array_equal(back["a.b"], big[0])
    assert mx.array_equal(back["a"]["b"], big[1])


# The order of parameters -----------------------------------------------------------


def named(**shapes):
    return {name.replace("__", "."): mx.zeros(shape) for name, shape in shapes.items()}


def adam_state(groups, tensors):
    names = [name for group in groups for name in group]
    state = {i: {"exp_avg": tensors[n], "step": 1} for i, n in enumerate(names)}
    start, packed = 0, []
    for group in groups:
        packed.append({"params": list(range(start, start + len(group)))})
        start += len(group)
    return {"state": state, "param_groups": packed}, dict(enumerate(names))


def test_decay_groups_are_dealt_out_by_shape():
    tensors = named(a__weight=(3, 2), a__bias=(3,), n__weight=(3,), n__bias=(3,),
                    b__weight=(2, 3), b__bias=(2,))  # fmt: skip
    decay = [n for n, t in tensors.items() if t.ndim == 2]
    rest = [n for n in tensors if n not in decay]
    state, want = adam_state([decay, rest], tensors)
    assert parameter_names(state, tensors, make_plan(tensors))[0] == want


def test_buffers_are_not_parameters():
    tensors = named(w=(3, 2), z=(5,), bn__weight=(3,), bn__bias=(3,))
    for buffer in ("running_mean", "running_var", "num_batches_tracked"):
        tensors[f"bn.{buffer}"] = mx.zeros(3)
    state, want = adam_state([["w", "z", "bn.weight", "bn.bias"]], tensors)
    plan = make_plan(tensors)
    assert parameter_names(state, tensors, plan)[0] == want
    # A buffer of another name, whose shape no parameter has, is passed over.
    tensors = named(w=(3, 2), mask=(7,), z=(5,))
    state, want = adam_state([["w", "z"]], tensors)
    assert parameter_names(state, tensors, make_plan(tensors))[0] == want


def test_doubt_is_an_error_that_says_how():
    tensors = named(a=(3,), b=(3,), c=(3,))
    state, _ = adam_state([["a", "c"], ["b"]], tensors)
    plan = make_plan(tensors)
    with pytest.raises(OrderError, match=r"More than one order.*--names"):
        parameter_names(state, tensors, plan)
    names = ["a", "c", "b"]
    assert parameter_names(state, tensors, plan, names)[0] == dict(enumerate(names))
    state["param_groups"][0]["param_names"] = ["a", "c"]
    state["param_groups"][1]["param_names"] = ["b"]
    assert parameter_names(state, tensors, plan)[0] == dict(enumerate(names))
    with pytest.raises(OrderError, match="2 names for the optimizer's 3"):
        parameter_names(state, tensors, plan, ["a", "b"])
    with pytest.raises(OrderError, match="'x' is not in the model"):
        parameter_names(state, tensors, plan, ["a", "b", "x"])
    state, _ = adam_state([["a", "b", "c"]], named(a=(3,), b=(4,), c=(3,)))
    with pytest.raises(OrderError, match="No order"):
        parameter_names(state, tensors, plan)


def test_a_safetensors_file_does_not_tell_the_order():
    tensors = Unordered(named(a=(3,), b=(3, 2), c=(4,)))
    state, want = adam_state([["b", "c", "a"]], tensors)
    assert parameter_names(state, tensors, make_plan(tensors))[0] == want
    tensors = Unordered(named(a=(3,), b=(3,)))
    state, want = adam_state([["b", "a"]], tensors)
    with pytest.raises(OrderError, match=r"safetensors.*--names"):
        parameter_names(state, tensors, make_plan(tensors))
    assert parameter_names(state, tensors, make_plan(tensors), ["b", "a"])[0] == want


def test_named_parameters_of_pytorch_are_used(tmp_path):
    torch = pytest.importorskip("torch")
    layer = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    turned = list(layer.named_parameters())[::-1]
    optimizer = torch.optim.Adam(turned)
    layer(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    torch.save(
        {"m": layer.state_dict(), "o": optimizer.state_dict()}, tmp_path / "a.pt"
    )
    forward(tmp_path / "a.pt", tmp_path / "run", "--rename", r"^(\d)\.=layers.\1.")
    moment = read_run(tmp_path / "run").optimizer["layers.0.weight.m"]
    want = optimizer.state[layer[0].weight]["exp_avg"].numpy()
    assert np.array_equal(np.array(moment), want)


# The command -----------------------------------------------------------------------


def paths(tmp_path, checkpoint=None):
    if checkpoint is not None:
        torch_checkpoint.save(tmp_path / "a.pt", checkpoint)
    return ["--torch-path", str(tmp_path / "a.pt"), "--mlx-path", str(tmp_path / "run")]


def usual():
    return shapes_of_checkpoints()["usual"]


def fails(capsys, *arguments):
    assert main(list(arguments)) == 1
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert said.startswith("error: ")
    return said


def test_dry_run_prints_the_plan_and_writes_nothing(tmp_path, capsys):
    where = ["--torch-path", str(GOLDEN / "conv_adamw.pt"), "--mlx-path"]
    assert main([*where, str(tmp_path / "run"), *model_flag("conv"), "--dry-run"]) == 0
    said = capsys.readouterr().out
    lines = [" ".join(line.split()) for line in said.splitlines()]
    assert "features.0.weight features.layers.0.weight 4x3x3x2 float32 conv" in lines
    assert "up.weight up.weight 4x3x3x6 float32 conv_transpose" in lines
    assert "features.1.num_batches_tracked (training.json)" in lines
    assert "0 AdamW 10 0.01 6" in lines  # one of the 7 steps was skipped
    assert "scale 512.0" in lines
    assert list(tmp_path.iterdir()) == []
    forward(GOLDEN / "conv_adamw.pt", tmp_path / "run", *model_flag("conv"))
    forward(tmp_path / "no.pt", tmp_path / "run", "--dry-run")
    assert not (tmp_path / "no.pt").exists()


def test_direction_and_existing_files(tmp_path, capsys):
    where = paths(tmp_path)
    assert "Neither path exists" in fails(capsys, *where)
    where = paths(tmp_path, usual())
    assert "nothing at --mlx-path" in fails(capsys, *where, "--to", "torch")
    assert main(where) == 0
    assert "Both paths exist" in fails(capsys, *where)
    before = (tmp_path / "run" / "training.json").read_bytes()
    assert "--overwrite" in fails(capsys, *where, "--to", "mlx")
    assert "--overwrite" in fails(capsys, *where, "--to", "torch")
    (tmp_path / "run" / "other").write_text("x")
    assert main([*where, "--to", "mlx", "--overwrite"]) == 0
    assert (tmp_path / "run" / "training.json").read_bytes() == before
    assert not (tmp_path / "run" / "other").exists()
    assert main([*where, "--to", "torch", "--overwrite"]) == 0
    assert {p.name for p in tmp_path.iterdir()} == {"a.pt", "run"}


def test_errors_are_one_line_and_leave_nothing(tmp_path, capsys):
    (tmp_path / "a.pt").write_bytes(b"garbage")
    fails(capsys, *paths(tmp_path))
    checkpoint = usual() | {"model": {"conv.weight": mx.zeros((2, 3, 3, 3))}}
    where = paths(tmp_path, checkpoint)
    assert "conv.weight" in fails(capsys, *where)
    assert "OLD=NEW" in fails(capsys, *where, "--rename", "x")
    assert "MODULE:NAME" in fails(capsys, *where, "--model", "x")
    assert "no_such_module" in fails(capsys, *where, "--model", "no_such_module:x")
    assert "has no nothing" in fails(capsys, *where, "--model", f"{__name__}:nothing")
    assert "mlx.nn.Module" in fails(capsys, *where, "--model", f"{__name__}:small")
    where = paths(tmp_path, {"model": {"w": mx.array([1.0])}, "odd": {1: 2}})
    assert main(where) == 0
    (tmp_path / "run" / "training.json").write_text('{"format": "other"}')
    (tmp_path / "a.pt").unlink()
    assert "not written by" in fails(capsys, *where)
    (tmp_path / "run" / "training.json").write_text("{")
    assert "is not JSON" in fails(capsys, *where)
    (tmp_path / "run" / "model.safetensors").write_bytes(b"xx")
    assert "not a safetensors file" in fails(capsys, *where)
    assert {p.name for p in tmp_path.iterdir()} == {"run"}
    with pytest.raises(SystemExit) as stopped:
        main([])
    assert stopped.value.code == 2


def test_a_refused_setting_can_be_accepted(tmp_path, capsys):
    checkpoint = usual()
    checkpoint["optimizer"]["param_groups"][0]["maximize"] = True
    where = paths(tmp_path, checkpoint)
    assert "--accept" in fails(capsys, *where)
    assert main([*where, "--accept", "maximize"]) == 0
    assert "[WARNING] SGD has maximize=True" in capsys.readouterr().err


def test_parts_that_are_gone_are_left_out_with_a_word(tmp_path, capsys):
    where = paths(tmp_path, usual())
    assert main(where) == 0
    (tmp_path / "a.pt").unlink()
    (tmp_path / "run" / "optimizer.safetensors").unlink()
    assert main(where) == 0
    assert "no optimizer state: it is left out" in capsys.readouterr().err
    assert list(torch_checkpoint.load(tmp_path / "a.pt")) == [
        "model",
        "scaler",
        "epoch",
    ]


def test_names_from_a_file(tmp_path):
    checkpoint = usual()
    model = {"a": mx.zeros(2), "b": mx.ones(2)}
    state = checkpoint["optimizer"]
    state["state"] = {i: {"momentum_buffer": mx.full(2, i)} for i in (0, 1)}
    where = paths(tmp_path, {"model": model, "optimizer": state})
    (tmp_path / "names.txt").write_text("b\na\n")
    assert main([*where, "--names", str(tmp_path / "names.txt"), "--step", "9"]) == 0
    flat = read_run(tmp_path / "run").optimizer
    assert (flat["b.v"].tolist(), flat["a.v"].tolist()) == ([0, 0], [1, 1])
    assert flat["step"].item() == 9


def test_float64_needs_a_decision(tmp_path, capsys):
    torch = pytest.importorskip("torch")
    torch.save({"w": torch.ones(3, dtype=torch.float64)}, tmp_path / "a.pt")
    where = paths(tmp_path)
    fails(capsys, *where)
    assert main([*where, "--float64", "float32"]) == 0
    assert read_run(tmp_path / "run").weights["w"].dtype == mx.float32


def test_an_optimizer_without_a_model_is_refused(tmp_path, capsys):
    _, optimizer, scaler = small()
    where = paths(tmp_path, {"optimizer": optimizer, "scaler": scaler})
    assert "no model" in fails(capsys, *where)
    assert main([*where, "--optimizer-key", ""]) == 0


def test_scaler_states_of_others_are_converted_with_a_word(tmp_path, capsys):
    model, _, _ = small()
    scaler = {"scale": mx.array([64.0]), "growth_tracker": 3, "hysteresis_tracker": 2}
    where = paths(tmp_path, {"model": model, "scaler": scaler})
    assert main(where) == 0
    said = capsys.readouterr().err
    assert "hysteresis_tracker" in said
    assert "growth_interval=1000" in said
    assert read_run(tmp_path / "run").scaler["scale"] == 64.0
    (tmp_path / "a.pt").unlink()
    assert main(where) == 0
    assert "came from megatron" in capsys.readouterr().err
    assert torch_checkpoint.load(tmp_path / "a.pt")["scaler"]["growth_interval"] == 1000


def test_as_a_process(tmp_path):
    run = [sys.executable, "-m", "mlx_gradscale"]
    where = paths(tmp_path, usual())
    done = subprocess.run([*run, "convert", *where], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    done = subprocess.run(run, capture_output=True, text=True)
    assert done.returncode == 2
    assert "convert" in done.stderr


# Into live objects -----------------------------------------------------------------


def test_a_failed_write_leaves_the_old_folder(tmp_path):
    run = from_torch(usual())
    write_run(tmp_path / "run", run)
    before = {p.name: p.read_bytes() for p in (tmp_path / "run").iterdir()}
    run.record["odd"] = object()
    with pytest.raises(TypeError, match="odd is a object"):
        write_run(tmp_path / "run", run, overwrite=True)
    run.record.pop("odd")
    run.scaler = {"scale": object()}
    with pytest.raises(TypeError):
        write_run(tmp_path / "run", run, overwrite=True)
    assert {p.name: p.read_bytes() for p in (tmp_path / "run").iterdir()} == before
    assert [p.name for p in tmp_path.iterdir()] == ["run"]


def test_a_place_that_cannot_be_taken_keeps_the_old_folder(tmp_path, monkeypatch):
    run = from_torch(usual())
    write_run(tmp_path / "run", run)
    rename, calls = Path.rename, []

    def second_fails(self, target):
        calls.append(target)
        if len(calls) == 2:
            raise OSError("no")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", second_fails)
    with pytest.raises(OSError, match="no"):
        write_run(tmp_path / "run", run, overwrite=True)
    assert [p.name for p in tmp_path.iterdir()] == ["run"]
    assert read_run(tmp_path / "run").scaler == run.scaler


class Small(nn.Module):
    def __init__(self, size=3):
        super().__init__()
        self.fc = nn.Linear(size, 2)


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


def half_steps(model, optimizer, steps):
    """Steps of a half-precision model with a LossScaleOptimizer."""

    def loss_fn(x, y):
        logits = model(x).astype(mx.float32).reshape(-1, TOKENS)
        return nn.losses.cross_entropy(logits, y.reshape(-1), reduction="mean")

    value_and_grad = nn.value_and_grad(model, optimizer.scale_loss(loss_fn))
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


@pytest.mark.parametrize("tqdm", [True, False])
def test_big_arrays_have_a_progress_bar_on_a_terminal(monkeypatch, capsys, tqdm):
    if tqdm:
        pytest.importorskip("tqdm")
    else:
        monkeypatch.setitem(sys.modules, "tqdm", None)
    arrays = {"a": mx.zeros(1000), "b": mx.ones(500) + 1}
    text.evaluate(arrays)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(text, "_BIG", 1)
    text.evaluate(arrays)
    assert capsys.readouterr().err == ""  # not a terminal
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    text.evaluate(arrays)
    said = capsys.readouterr().err
    assert "converting" in said
    assert "100%" in said if tqdm else "6.0 kB of 6.0 kB" in said


def test_choices_from_python():
    tensors = {"c.weight": mx.zeros((2, 3, 5))}
    run = from_torch(tensors, options=Options(Choices(conv=("c.*",))))
    assert run.weights["c.weight"].shape == (2, 5, 3)


def test_importing_needs_no_torch():
    code = (
        "import sys; import mlx_gradscale.convert, mlx_gradscale.inspect; "
        "bad = {'torch', 'tqdm', 'matplotlib', 'mlx_lm'} & set(sys.modules); "
        "sys.exit(str(bad) if bad else 0)"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    assert subprocess.run([sys.executable, "-c", code], env=environment).returncode == 0
