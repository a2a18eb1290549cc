"""Where the model, the optimizer and the scaler are in checkpoints of any shape."""

from collections import OrderedDict

import mlx.core as mx
import numpy as np
import pytest
from support.convert_runs import (
    Small,
    find,
    identical,
    round_trip,
    sgd,
    shapes_of_checkpoints,
    small,
)

from mlx_gradscale import torch_checkpoint as pt
from mlx_gradscale.convert import ConvertError, load_torch
from mlx_gradscale.torch_checkpoint import Placeholder


def there_and_back(tmp_path, checkpoint, **options):
    """Load into a live model and save again; returns the run."""
    model, run, back, _ = round_trip(tmp_path, checkpoint, **options)
    identical(back, checkpoint)
    assert model.fc.bias.tolist() == [1.0, 2.0]
    return run


@pytest.mark.parametrize("kind", shapes_of_checkpoints())
def test_sections_are_found_at_any_depth_and_round_trip(kind, tmp_path):
    run = there_and_back(tmp_path, shapes_of_checkpoints()[kind])
    assert run.optimizer.state["fc"]["bias"]["v"].tolist() == [3.0, 4.0]
    assert run.scaler.get_scale() == 512.0
    if kind in ("mmengine", "torchtitan"):
        beside = {"mmengine": "meta", "torchtitan": "train"}[kind]
        assert any(f"not converted: {beside}. " in note for note in run.notes)


def test_several_models_require_a_key_but_averages_do_not():
    model, other, optimizer = small()[0], small(7)[0], small()[1]
    averaged = find({"model": model, "ema": other}, {})
    assert averaged["model"] == [("model",)]
    with pytest.raises(ConvertError, match=r"2 models: a, b. .*--model-key.*--like"):
        find({"a": model, "b": other}, {})
    assert find({"a": model, "b": other}, {"model": "b"})["model"] == [("b",)]
    several = {"a": model, "b": other, "optimizers": [optimizer, small(7)[1]]}
    with pytest.raises(ConvertError, match=r"2 optimizers: optimizers/0, optimizers/1"):
        find(several, {"model": "a"})
    found = find(several, {"model": "a", "optimizer": "optimizers/1"})
    assert found["optimizer"] == [("optimizers", 1)]
    assert find(several, {"model": "a", "optimizer": ""})["optimizer"] == []


@pytest.mark.parametrize(
    ("keys", "found"),
    [
        ({"model": "c"}, "a"),
        ({"model": "epoch"}, "a"),
        ({"optimizer": "a"}, "opt"),
        ({"optimizer": "opt/7"}, "opt"),
        ({"scaler": "epoch"}, "none"),
        ({"optimiser": "opt"}, "none"),
    ],
)
def test_key_without_a_matching_section_is_an_error(keys, found):
    model, optimizer, _ = small()
    ((name, key),) = keys.items()
    word = rf"of the {name} at .*'{key}'.* \(--{name}-key\)\. Found: {found}\."
    with pytest.raises(ConvertError, match=word):
        find({"a": model, "opt": optimizer, "epoch": 3}, keys)


def test_state_dict_values_that_are_not_tensors_survive_a_round_trip(tmp_path):
    model, optimizer, _ = small()
    model = OrderedDict({"fc._extra_state": {"calls": 3}, **model})
    mixed = OrderedDict({**model, "temperature": 0.5})
    there_and_back(tmp_path, {"net": model, "opt": optimizer})
    there_and_back(tmp_path, {"model": mixed, "optimizer": optimizer})
    there_and_back(tmp_path, {"n": mixed, "o": optimizer}, keys={"model": "n"})


def test_foreign_objects_and_unusual_values_come_back_unchanged(tmp_path):
    args = Placeholder("argparse", "Namespace").called(b"R", ())
    odd = (1, {2: b"x", "y": {3.5}}, None, float("inf"), 1 + 2j, frozenset({1, 2}))
    rng = mx.arange(100, dtype=mx.uint8)
    checkpoint = {"model": small()[0], "args": args, "odd": odd, "rng": rng}
    back = round_trip(tmp_path, checkpoint).back
    assert back["odd"] == odd
    assert type(back["odd"][-1]) is frozenset
    assert str(back["args"]) == str(args)
    identical(back["rng"], rng)


def test_numpy_numbers_are_numbers_and_pickled_modules_are_refused(tmp_path):
    torch = pytest.importorskip("torch")
    layer = torch.nn.ModuleDict({"fc": torch.nn.Linear(3, 2)})
    optimizer = torch.optim.AdamW(layer.parameters(), lr=np.float64(0.25)).state_dict()
    torch.save({"model": layer.state_dict(), "opt": optimizer}, tmp_path / "a.pt")
    run = load_torch(tmp_path / "a.pt", Small())
    assert run.optimizer.learning_rate.item() == 0.25
    torch.save({"model": layer, "opt": optimizer}, tmp_path / "a.pt")
    for keys in ({}, {"model": "model"}):
        with pytest.raises(ConvertError, match=r"pickled module.*state_dict\(\)"):
            load_torch(tmp_path / "a.pt", Small(), keys=keys)


@pytest.mark.parametrize(
    ("found", "word"),
    [
        ({"optimizer": small()[1], "epoch": 3}, "optimizer, epoch.*--model-key"),
        (small()[2], r"GradScaler\.load"),
    ],
)
def test_checkpoint_without_a_model_is_an_error_that_says_what_to_do(found, word):
    with pytest.raises(ConvertError, match=rf"No model.*{word}"):
        find(found, {})


def test_moments_outside_an_optimizer_are_not_silently_dropped(tmp_path):
    model, optimizer, _ = small()
    moments = {"fc.weight": {"exp_avg": mx.zeros((2, 3))}}
    pt.save(tmp_path / "a.pt", {"model": model, "opt": moments})
    with pytest.raises(ConvertError, match=r"opt/fc\.weight looks like an optimizer"):
        load_torch(tmp_path / "a.pt", Small())
    keys = {"optimizer": ""}
    run = there_and_back(tmp_path, {"model": model, "opt": moments}, keys=keys)
    assert any("not converted" in note for note in run.notes)
    both = {"model": model, "optimizer": optimizer, "other": moments}
    assert any("other" in note for note in there_and_back(tmp_path, both).notes)


def test_deepspeed_optimizer_converts_unless_it_is_flat_and_only_as_an_optimizer(
    tmp_path,
):
    """As its FP16_Optimizer writes it. Only PyTorch's keys identify a scaler."""
    weights = {name: x.astype(mx.float16) for name, x in small()[0].items()}
    optimizer = {
        "dynamic_loss_scale": True, "cur_scale": 256.0, "cur_iter": 3,
        "last_overflow_iter": -1, "scale_factor": 2.0, "scale_window": 1000,
        "optimizer_state_dict": small()[1], "clip_grad": 0.0,
        "fp32_groups": [[x.astype(mx.float32) for x in weights.values()]],
    }  # fmt: skip
    apex = {"loss_scaler0": {"loss_scale": 128.0, "unskipped": 7}}
    checkpoint = {"module": weights, "optimizer": optimizer, "amp": apex}
    run = there_and_back(tmp_path, checkpoint)
    assert run.scaler is None
    assert run.optimizer.state["fc"]["bias"]["v"].tolist() == [3.0, 4.0]
    # Loaded in PyTorch, these master weights would undo the steps of MLX.
    assert any("optimizer/fp32_groups" in note for note in run.notes)
    flat = {"state": {0: {"momentum_buffer": mx.zeros(8)}}, "param_groups": [sgd([0])]}
    optimizer["optimizer_state_dict"] = flat
    pt.save(tmp_path / "a.pt", checkpoint)
    with pytest.raises(ConvertError, match=r"of DeepSpeed.*--optimizer-key ''"):
        load_torch(tmp_path / "a.pt", Small())
    there_and_back(tmp_path, checkpoint, keys={"optimizer": ""})


def test_indices_that_torch_distributed_writes_as_strings_convert(tmp_path):
    model, optimizer, _ = small()
    optimizer["state"] = {str(i): slots for i, slots in optimizer["state"].items()}
    checkpoint = {"model": model, "optim": optimizer}
    run = there_and_back(tmp_path, checkpoint)
    assert run.optimizer.state["fc"]["bias"]["v"].tolist() == [3.0, 4.0]
    frozen = Small()
    frozen.fc.freeze(keys=["bias"])
    back = round_trip(tmp_path, checkpoint, model=frozen).back
    assert back["optim"]["state"]["1"]["momentum_buffer"].tolist() == [3.0, 4.0]


def test_optimizer_whose_empty_state_is_missing_converts(tmp_path):
    model, optimizer, _ = small()
    del optimizer["state"]
    back = round_trip(tmp_path, {"model": model, "optimizer": optimizer}, steps=1).back
    assert back["optimizer"]["state"][1]["momentum_buffer"].tolist() == [1.0, 1.0]


def test_shared_state_dict_is_one_model(tmp_path):
    model = small()[0]
    shared = {"state_dict": model, "model": model}
    for keys in ({}, {"model": "model"}):
        there_and_back(tmp_path, shared, keys=keys)
        back = pt.load(tmp_path / "b.pt")
        assert back["model"] is back["state_dict"]
