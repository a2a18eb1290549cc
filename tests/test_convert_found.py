"""What is taken for the model and the optimizer, and what is said of the rest."""

import mlx.core as mx
import pytest
from convert_helpers import fails, forward, identical, paths, small, usual

from mlx_gradscale import torch_checkpoint
from mlx_gradscale.convert import Options, from_torch, main, read_run, to_torch
from mlx_gradscale.convert.sections import SectionsError, find_sections


def changed(model, by=1.0):
    return {name: tensor + by for name, tensor in model.items()}


def lightning_with_average():
    """As WeightAveraging saves it: the average is in state_dict."""
    model, optimizer, _ = small()
    return {
        "pytorch-lightning_version": "2.6.0",
        "state_dict": changed(model),
        "current_model_state": model,
        "averaging_state": {"n_averaged": mx.array(3)},
        "optimizer_states": [optimizer],
    }


def test_lightnings_average_is_not_taken_for_the_trained_model(tmp_path, capsys):
    checkpoint = lightning_with_average()
    where = paths(tmp_path, checkpoint)
    assert main(where) == 0
    said = capsys.readouterr().err
    assert "current_model_state is taken for the model" in said
    assert "state_dict: also a model" in said
    run = read_run(tmp_path / "run")
    assert mx.array_equal(run.weights["fc.weight"], small()[0]["fc.weight"])
    forward(tmp_path / "back.pt", tmp_path / "run")
    identical(torch_checkpoint.load(tmp_path / "back.pt"), checkpoint)
    run = from_torch(checkpoint, options=Options(keys={"model": "state_dict"}))
    assert mx.array_equal(run.weights["fc.bias"], mx.array([2.0, 3.0]))


@pytest.mark.parametrize("name", ["ema", "model_ema", "ema_model", "state_dict_ema",
                                  "swa_state", "teacher", "averaged"])  # fmt: skip
@pytest.mark.parametrize("own", ["model", "net", "generator"])
def test_averages_are_kept_with_a_word(own, name):
    model = small()[0]
    checkpoint = {own: model, name: changed(model)}
    assert find_sections(checkpoint) == {"model": (own,)}
    (note,) = from_torch(checkpoint).notes
    assert f"{own} is taken for the model" in note
    assert name in note


@pytest.mark.parametrize(
    "names",
    [("net_a", "net_b"), ("model.safetensors", "model_1.safetensors"),
     ("pytorch_model.bin", "pytorch_model_1.bin"), ("ema", "swa"),
     ("model.safetensors", "pytorch_model.bin")],
)  # fmt: skip
def test_two_models_are_not_guessed_at(names):
    """The first of Accelerate's two models was taken without a word."""
    model = small()[0]
    checkpoint = {name: changed(model, i) for i, name in enumerate(names)}
    with pytest.raises(SectionsError, match="--model-key"):
        find_sections(checkpoint)
    parts = find_sections(checkpoint, {"model": names[1]})
    assert parts == {"model": (names[1],)}


def test_a_state_keyed_by_names_is_read_by_name(tmp_path):
    """In any order: FullyShardedDataParallel and torch.distributed write it so."""
    model, optimizer, _ = small()
    names = list(model)
    wrapped = {f"module.{name}": tensor for name, tensor in model.items()}
    states = {names[i]: optimizer["state"][i] for i in (1, 0)}
    group = optimizer["param_groups"][0] | {"params": names[::-1]}
    checkpoint = {"m": wrapped, "o": {"state": states, "param_groups": [group]}}
    torch_checkpoint.save(tmp_path / "a.pt", checkpoint)
    forward(tmp_path / "a.pt", tmp_path / "run")
    flat = read_run(tmp_path / "run").optimizer
    assert flat["fc.bias.v"].tolist() == [3.0, 4.0]
    assert mx.array_equal(flat["fc.weight.v"], model["fc.weight"] * 2)
    forward(tmp_path / "b.pt", tmp_path / "run")
    identical(torch_checkpoint.load(tmp_path / "b.pt"), checkpoint)


def square():
    """Two parameters that only their names tell apart."""
    model = {"a": mx.ones((2, 2)), "b": mx.zeros((2, 2))}
    group = {"lr": 0.1, "momentum": 0.9, "dampening": 0, "weight_decay": 0,
             "nesterov": False, "params": ["b", "a"]}  # fmt: skip
    states = {n: {"momentum_buffer": mx.full((2, 2), i)} for i, n in enumerate("ba")}
    return {"model": model, "opt": {"state": states, "param_groups": [group]}}


def test_the_order_of_names_does_not_matter():
    run = from_torch(square())
    assert run.optimizer["a.v"][0, 0].item() == 1
    assert run.optimizer["b.v"][0, 0].item() == 0
    identical(to_torch(run)[0]["opt"], square()["opt"])


def test_more_keys_in_an_optimizers_dict_come_back(tmp_path):
    """mmengine keeps its scaler there."""
    model, optimizer, scaler = small()
    extra = {"loss_scaler": scaler, "base_lr": 0.1, "counts": [1, {"n": (2,)}]}
    checkpoint = {"state_dict": model, "optimizer": optimizer | extra}
    torch_checkpoint.save(tmp_path / "a.pt", checkpoint)
    forward(tmp_path / "a.pt", tmp_path / "run")
    run = read_run(tmp_path / "run")
    assert run.scaler == scaler
    run.scaler["scale"] = 4.0
    back, _ = to_torch(run)
    assert back["optimizer"]["loss_scaler"]["scale"] == 4.0
    forward(tmp_path / "b.pt", tmp_path / "run")
    identical(torch_checkpoint.load(tmp_path / "b.pt"), checkpoint)
    run.scaler = None
    assert "loss_scaler" not in to_torch(run)[0]["optimizer"]


def flat():
    """As torch.distributed flattens it; the groups differ in their weight decay."""
    checkpoint = square()
    states = checkpoint["opt"]["state"]
    group = checkpoint["opt"]["param_groups"][0]
    out = {f"state.{n}.{k}": x for n, held in states.items() for k, x in held.items()}
    for name in group.pop("params"):
        held = group | {"lr": 0.1 if name == "a" else 0.2}
        out |= {f"param_groups.{name}.{key}": x for key, x in held.items()}
    return {"model": checkpoint["model"], "opt": out}


def test_a_flattened_optimizer_is_converted(tmp_path):
    torch_checkpoint.save(tmp_path / "a.pt", flat())
    forward(tmp_path / "a.pt", tmp_path / "run")
    run = read_run(tmp_path / "run")
    assert {k: v for k, v in run.optimizer.items() if "v" in k}.keys() == {
        *("states.0.b.v", "states.1.a.v")
    }
    forward(tmp_path / "b.pt", tmp_path / "run")
    back = torch_checkpoint.load(tmp_path / "b.pt")
    identical(dict(sorted(back["opt"].items())), dict(sorted(flat()["opt"].items())))


@pytest.mark.parametrize("kind", ["by slot", "flat, cut", "a list", "nested"])
def test_what_looks_like_an_optimizer_is_not_left_out_in_silence(
    kind, tmp_path, capsys
):
    model, optimizer, _ = small()
    moments = {name: tensor * 2 for name, tensor in model.items()}
    state = {
        "by slot": {"exp_avg": moments, "exp_avg_sq": moments, "step": 3},
        "flat, cut": {f"state.{n}.exp_avg": x for n, x in moments.items()} | {"n": 1},
        "a list": [optimizer["state"][0], {"lr": 0.1}],
        "nested": {"x": {"y": {"state": optimizer["state"], "groups": []}}},
    }[kind]
    where = paths(tmp_path, {"model": model, "opt": state})
    said = fails(capsys, *where)
    assert "looks like the state of an optimizer" in said
    assert "--optimizer-key ''" in said
    assert not (tmp_path / "run").exists()
    assert main([*where, "--optimizer-key", ""]) == 0
    capsys.readouterr()
    where[1] = str(tmp_path / "back.pt")
    assert main(where) == 0
    assert "goes back as it was, beside newer weights" in capsys.readouterr().err
    identical(torch_checkpoint.load(tmp_path / "back.pt")["opt"], state)


def test_an_optimizer_that_is_left_out_is_named_on_the_way_back(tmp_path, capsys):
    where = paths(tmp_path, usual())
    assert main([*where, "--optimizer-key", ""]) == 0
    where[1] = str(tmp_path / "back.pt")
    assert main(where) == 0
    assert "optimizer: an optimizer's state" in capsys.readouterr().err


def test_numbers_that_became_texts_are_numbers():
    """As in a folder of torch.distributed.checkpoint, or what PyTorch makes of it."""
    tensors, state, _ = small()
    texts = {**state, "state": {str(k): v for k, v in state["state"].items()}}
    found, want = (
        from_torch({"model": tensors, "optimizer": each}) for each in (texts, state)
    )
    assert found.optimizer.keys() == want.optimizer.keys()
    for key, x in want.optimizer.items():
        assert mx.array_equal(found.optimizer[key], x)
    others = {**state, "state": {k + 7: v for k, v in state["state"].items()}}
    with pytest.raises(ValueError, match="an index of the state must be one of params"):
        from_torch({"model": tensors, "optimizer": others})


def test_an_optimizer_whose_empty_state_was_left_out():
    group = {"lr": 0.1, "momentum": 0, "dampening": 0, "weight_decay": 0,
             "nesterov": False, "maximize": False, "params": [0]}  # fmt: skip
    checkpoint = {"model": {"w": mx.ones(2)}, "optim": {"param_groups": [group]}}
    run = from_torch(checkpoint)
    assert run.record.optimizer.name == "SGD"
    back, _ = to_torch(run)
    assert back["optim"] == {"state": {}, "param_groups": [group]}
