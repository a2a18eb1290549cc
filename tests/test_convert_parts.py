"""The parts of a checkpoint, its rest as JSON, and the order of parameters."""

import json
import tempfile
from collections import OrderedDict

import mlx.core as mx
import numpy as np
import pytest
from convert_helpers import (
    forward,
    identical,
    shapes_of_checkpoints,
    small,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_gradscale import torch_checkpoint
from mlx_gradscale.convert import (
    Choices,
    Options,
    from_torch,
    read_run,
    read_torch,
    to_torch,
    write_run,
)
from mlx_gradscale.convert.jsonable import decode, encode
from mlx_gradscale.convert.order import OrderError, parameter_names
from mlx_gradscale.convert.parts import PartsError, Unordered, find_parts
from mlx_gradscale.layouts import make_plan
from mlx_gradscale.torch_optimizers import ROWS


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


def test_values_in_a_state_dict_that_are_no_tensors_return(tmp_path):
    model, optimizer, _ = small()
    model = OrderedDict({"fc._extra_state": {"calls": 3}, **model})
    bare = OrderedDict({**model, "temperature": 0.5})
    for name, checkpoint, flags in (
        ("extra", {"net": model, "opt": optimizer}, []),
        ("bare", bare, []),
        ("usual", {"model": bare, "optimizer": optimizer}, []),
        ("odd", {"n": bare, "o": optimizer}, ["--model-key", "n"]),
    ):
        source, run = tmp_path / f"{name}.pt", tmp_path / name
        torch_checkpoint.save(source, checkpoint)
        forward(source, run, *flags)
        assert read_run(run).weights.keys() == {"fc.weight", "fc.bias"}
        forward(tmp_path / "back.pt", run, "--overwrite", "--to", "torch")
        identical(torch_checkpoint.load(tmp_path / "back.pt"), checkpoint)
        (tmp_path / "back.pt").unlink()


def test_a_dict_that_may_be_a_model_is_not_taken_for_one():
    model, optimizer, scaler = small()
    stats = {"losses": mx.ones(3), "epoch": 4}
    both = {"net": model, "stats": stats, "best": mx.ones(2), "epoch": 3}
    assert find_parts(both) == {"model": ("net",)}
    assert find_parts({"stats": stats, "amp": scaler}) == {"scaler": ("amp",)}
    with pytest.raises(PartsError, match=r"stats holds .*'epoch'.*--model-key"):
        find_parts({"stats": stats, "opt": optimizer})
    with pytest.raises(PartsError, match="no model state"):
        find_parts(both, {"model": "epoch"})


def test_an_extra_state_of_pytorch_returns(tmp_path):
    torch = pytest.importorskip("torch")

    class Counted(torch.nn.Linear):
        calls = 0

        def get_extra_state(self):
            return {"calls": self.calls}

        def set_extra_state(self, state):
            self.calls = state["calls"]

    first, second = Counted(3, 2), Counted(3, 2)
    first.calls = 7
    torch.save({"model": first.state_dict()}, tmp_path / "a.pt")
    forward(tmp_path / "a.pt", tmp_path / "run")
    forward(tmp_path / "b.pt", tmp_path / "run")
    back = torch.load(tmp_path / "b.pt", weights_only=True)
    second.load_state_dict(back["model"], strict=True)
    assert second.calls == 7


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


def mixed_up(tmp_path, capsys, names):
    """What a run says whose optimizer was given the parameters in another order."""
    torch = pytest.importorskip("torch")
    net = torch.nn.ModuleDict({n: torch.nn.Linear(2, 2, bias=False) for n in "ab"})
    order = list(net.named_parameters())[::-1]
    optimizer = torch.optim.Adam(order if names else [p for _, p in order])
    net["b"](net["a"](torch.tensor([[1.0, 2.0]]))).sum().backward()
    optimizer.step()
    checkpoint = {"model": net.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(checkpoint, tmp_path / "a.pt")
    forward(tmp_path / "a.pt", tmp_path / "run")
    return capsys.readouterr().err


def test_an_order_that_shapes_cannot_check_is_said(tmp_path, capsys):
    said = mixed_up(tmp_path, capsys, names=False)
    assert "2 of 2 have the shape of another (a.weight, b.weight, ...)" in said
    assert "--names FILE" in said


def test_named_parameters_leave_no_doubt(tmp_path, capsys):
    assert "another order" not in mixed_up(tmp_path, capsys, names=True)


def test_shapes_that_tell_and_states_without_moments_leave_no_doubt():
    tensors = named(a=(3,), b=(3, 2))
    state, _ = adam_state([["a", "b"]], tensors)
    assert parameter_names(state, tensors, make_plan(tensors))[1] == []
    tensors = named(a=(3,), b=(3,))
    state, _ = adam_state([["a", "b"]], tensors)
    assert len(parameter_names(state, tensors, make_plan(tensors))[1]) == 1
    assert parameter_names(state, tensors, make_plan(tensors), ["a", "b"])[1] == []
    state["state"] = {}  # plain SGD: there is nothing to mix up
    assert parameter_names(state, tensors, make_plan(tensors))[1] == []
    # The model's order leaves one way, but c could be meant just as well as a.
    tensors = named(a=(3,), b=(3, 2), c=(3,))
    state, want = adam_state([["a", "b"]], tensors)
    found, notes = parameter_names(state, tensors, make_plan(tensors))
    assert (found, len(notes)) == (want, 1)


def test_advice_for_frozen_parameters():
    tensors = named(a=(3,), b=(3,), c=(3,))
    state, _ = adam_state([["a", "c"]], tensors)
    plan = make_plan(tensors)
    with pytest.raises(OrderError, match=r"More than one.* if p\.requires_grad\]"):
        parameter_names(state, tensors, plan)
    with pytest.raises(OrderError, match=r"3 names .* if p\.requires_grad\]"):
        parameter_names(state, tensors, plan, ["a", "b", "c"])
    with pytest.raises(OrderError, match="'a' more than once"):
        parameter_names(state, tensors, plan, ["a", "a"])


@pytest.mark.parametrize("wrapper", ["module.", "_orig_mod.", "module._orig_mod."])
@pytest.mark.parametrize("where", ["model", "optimizer"])
def test_names_with_and_without_a_wrapper_are_the_same(wrapper, where):
    names = ["fc.weight", "fc.bias"]
    wrapped = [wrapper + name for name in names]
    model, optimizer, _ = small()
    group = optimizer["param_groups"][0]
    group["param_names"] = wrapped if where == "optimizer" else names
    if where == "model":
        model = OrderedDict(zip(wrapped, model.values(), strict=True))
    checkpoint = {"model": model, "optimizer": optimizer}
    options = Options(Choices(rename=[("^" + wrapper.replace(".", r"\."), "")]))
    run = from_torch(checkpoint, options=options)
    assert run.optimizer["fc.bias.v"].tolist() == [3.0, 4.0]
    identical(to_torch(run)[0], checkpoint)


def test_names_that_renames_make_equal_are_found():
    model, optimizer, _ = small()
    optimizer["param_groups"][0]["param_names"] = ["net.fc.weight", "net.fc.bias"]
    checkpoint = {"model": model, "optimizer": optimizer}
    options = Options(Choices(rename=[(r"^net\.", "")]))
    run = from_torch(checkpoint, options=options)
    assert run.optimizer["fc.bias.v"].tolist() == [3.0, 4.0]


@pytest.mark.parametrize("names", [True, False])
def test_dropped_parameters_keep_their_moments_for_the_way_back(names, tmp_path):
    model, optimizer, scaler = small()
    model["head.weight"], model["mask"] = mx.ones((5, 2)), mx.zeros((7, 7))
    moment = {"momentum_buffer": mx.full((5, 2), 8.0)}
    optimizer["state"] |= {2: moment}
    group = optimizer["param_groups"][0]
    group["params"] = [0, 1, 2]
    if names:
        group["param_names"] = ["fc.weight", "fc.bias", "head.weight"]
    checkpoint = {"model": model, "optimizer": optimizer, "scaler": scaler}
    torch_checkpoint.save(tmp_path / "a.pt", checkpoint)
    drops = ["--drop", "head.*", "--drop", "mask"]
    forward(tmp_path / "a.pt", tmp_path / "run", *drops)
    assert read_run(tmp_path / "run").optimizer.keys() == {
        "step",
        "learning_rate",
        "fc.weight.v",
        "fc.bias.v",
    }
    forward(tmp_path / "b.pt", tmp_path / "run")
    identical(torch_checkpoint.load(tmp_path / "b.pt"), checkpoint)
