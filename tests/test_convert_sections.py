"""The parts of a checkpoint, and its rest as JSON."""

import json
import tempfile
from collections import OrderedDict

import mlx.core as mx
import numpy as np
import pytest
from convert_helpers import forward, identical, shapes_of_checkpoints, small
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
from mlx_gradscale.convert.optimizers import ROWS
from mlx_gradscale.convert.sections import SectionsError, find_sections
from mlx_gradscale.run_folder.values import decode, encode


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
    assert find_sections({"model": model, "ema": model}) == {"model": ("model",)}
    two = {"a": model, "b": model}
    with pytest.raises(SectionsError, match="--model-key, one of a, b"):
        find_sections(two)
    assert find_sections(two, {"model": "b"}) == {"model": ("b",)}
    several = {"model": model, "optimizers": [optimizer, optimizer]}
    with pytest.raises(SectionsError, match="optimizers/0, optimizers/1"):
        find_sections(several)
    found = find_sections(several, {"optimizer": "optimizers/1"})
    assert found["optimizer"] == ("optimizers", 1)
    assert "optimizer" not in find_sections(several, {"optimizer": ""})
    with pytest.raises(SectionsError, match="no 'c' in"):
        find_sections(two, {"model": "c"})
    with pytest.raises(SectionsError, match="no scaler state"):
        find_sections(two, {"model": "a", "scaler": "b"})
    with pytest.raises(SectionsError, match="no model, optimizer or scaler"):
        find_sections({"epoch": 3})
    rng = {"cpu": mx.zeros(10, mx.uint8)}
    assert find_sections({"model": model, "rng": rng}) == {"model": ("model",)}


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
    assert find_sections(both) == {"model": ("net",)}
    assert find_sections({"stats": stats, "amp": scaler}) == {"scaler": ("amp",)}
    with pytest.raises(SectionsError, match=r"stats holds .*'epoch'.*--model-key"):
        find_sections({"stats": stats, "opt": optimizer})
    with pytest.raises(SectionsError, match="no model state"):
        find_sections(both, {"model": "epoch"})


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
