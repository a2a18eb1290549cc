"""The order of parameters: which of the optimizer's is which of the model's."""

from collections import OrderedDict

import mlx.core as mx
import numpy as np
import pytest
from convert_helpers import forward, identical, small

from mlx_gradscale import torch_checkpoint
from mlx_gradscale.convert import Choices, Options, from_torch, read_run, to_torch
from mlx_gradscale.convert.layouts import make_plan
from mlx_gradscale.convert.parameter_order import OrderError, parameter_names
from mlx_gradscale.convert.sections import Unordered


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


def test_names_in_the_models_order_are_dealt_out_too():
    """As Transformers' Trainer parts them, from a file that keeps no order."""
    tensors = named(a__weight=(3, 2), a__bias=(3,), n__weight=(3,), b__weight=(3, 2))
    decay = [n for n, t in tensors.items() if t.ndim == 2]
    rest = [n for n in tensors if n not in decay]
    state, want = adam_state([decay, rest], tensors)
    held = Unordered(sorted(tensors.items()))
    plan = make_plan(held)
    for names in ([*decay, *rest], list(tensors)):
        assert parameter_names(state, held, plan, names) == (want, [])
    state, _ = adam_state([["a.weight", "a.bias"], ["b.weight", "n.weight"]], tensors)
    with pytest.raises(OrderError, match="More than one order"):
        parameter_names(state, held, plan, [*decay, *rest])


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
