"""What a model's sanitize does is found by trying it, or refused."""

import json
import sys

import mlx.core as mx
import mlx.nn as nn
import pytest
from support.convert_runs import (
    fails,
    identical,
    paths,
    round_trip,
    small,
    small_adam,
)

from mlx_gradscale import torch_checkpoint
from mlx_gradscale.checkpoint import read_checkpoint
from mlx_gradscale.convert import load_torch
from mlx_gradscale.convert.command import main
from mlx_gradscale.convert.layouts import probe_sanitize

SHAPES = {"h.w": (4, 4), "h.conv": (5, 3, 2, 2), "h.one": (1, 4), "h.b": (4,),
          "rope": (2,), "scalar": ()}  # fmt: skip


class Model(nn.Module):
    """Square weights are turned: their shapes would not tell."""

    def __init__(self):
        super().__init__()
        self.model = nn.Module()
        self.model.h = nn.Linear(4, 4)

    def sanitize(self, weights):
        weights.pop("rope", None)  # of its own copy
        out = {}
        for name, x in weights.items():
            if x.ndim == 4:
                x = x.transpose(0, 2, 3, 1)
            out[f"model.{name}"] = x.T if name.endswith(".w") else x
        return out


def test_sanitize_probe_finds_renames_and_axis_permutations():
    before = dict(SHAPES)
    found = probe_sanitize(Model(), SHAPES)
    assert before == SHAPES
    assert found == {
        "h.w": ("model.h.w", "transpose"),
        "h.conv": ("model.h.conv", "conv"),
        "h.one": ("model.h.one", "same"),
        "h.b": ("model.h.b", "same"),
        "scalar": ("model.scalar", "same"),
    }


@pytest.mark.parametrize(
    "way",
    [
        lambda w: {"x": w["h.w"] + 1},
        lambda w: {"x": w["h.w"] * 2},
        lambda w: {"x": w["h.w"] / 3},
        lambda w: {"a": w["h.w"][:2], "b": w["h.w"][2:]},
        lambda w: {"a": w["h.w"], "b": w["h.w"]},
        lambda w: {"x": mx.concatenate([w["h.w"], w["h.w"]])},
        lambda w: {"x": mx.stack([w["h.b"], w["h.b"]])},
        lambda w: {"x": w["h.conv"].transpose(3, 2, 1, 0)},
        lambda w: {"x": w["nothing"]},
        lambda w: {"x": "text"},
        lambda w: 3,
    ],
)
def test_sanitize_that_does_more_than_rename_and_transpose_is_refused(way):
    model = nn.Module()
    model.sanitize = way
    with pytest.raises(ValueError, match=r"sanitize|axes"):
        probe_sanitize(model, SHAPES)


class Turned(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(2, 2)

    def sanitize(self, weights):
        return {k: v.T if v.ndim == 2 else v for k, v in weights.items() if k != "rope"}


def test_moments_are_transposed_with_their_weights(tmp_path):
    model = {"fc.weight": mx.array([[1.0, 2.0], [3.0, 4.0]]), "fc.bias": mx.zeros(2)}
    model = {f"module.{k}": v for k, v in model.items()} | {"module.rope": mx.ones(3)}
    checkpoint = {"model": model, "opt": small()[1]}
    moment = mx.array([[5.0, 6.0], [7.0, 8.0]])
    checkpoint["opt"]["state"][0]["momentum_buffer"] = moment
    names = ("module.fc.weight", "module.fc.bias")
    trip = round_trip(tmp_path, checkpoint, model=Turned(), names=names)
    assert trip.model.fc.weight.tolist() == [[1.0, 3.0], [2.0, 4.0]]
    state = trip.run.optimizer.state["fc"]["weight"]["v"]
    assert state.tolist() == [[5.0, 7.0], [6.0, 8.0]]
    identical(trip.back, checkpoint)


class TiedByPop(nn.Module):
    """As Gemma 3 of mlx-lm: sanitize removes a module where the weights have none."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(3, 2)
        self.lm_head = nn.Linear(2, 2)
        self.tied = False

    def sanitize(self, weights):
        if "lm_head.weight" not in weights:
            self.tied = True
            self.pop("lm_head")
        return weights


@pytest.mark.parametrize("times", [1, 2])
def test_sanitize_that_removes_a_module_is_probed_and_applied_once(tmp_path, times):
    torch_checkpoint.save(tmp_path / "a.pt", {"model": small()[0]})
    model = TiedByPop()
    for _ in range(times):  # the second time it has none to remove
        load_torch(tmp_path / "a.pt", model)
    assert model.tied
    assert [*model.parameters()] == ["fc"]


def test_parameter_missing_from_the_optimizer_must_be_frozen_before_loading(tmp_path):
    weights, optimizer, group = small_adam()
    group["params"] = [0]
    del optimizer["state"][1]
    checkpoint = {"model": weights, "optimizer": optimizer}
    model, options = TiedByPop(), {"names": ("fc.weight",)}
    before = mx.array(model.fc.weight)
    with pytest.raises(ValueError, match=r"for trainable parameters.*fc\.bias.*Freeze"):
        round_trip(tmp_path, checkpoint, model=model, **options)
    # The failed load has changed nothing, and sanitize neither.
    assert mx.array_equal(model.fc.weight, before)
    assert "lm_head" in model
    assert not model.tied
    model.fc.freeze(keys=["bias"])
    load_torch(tmp_path / "a.pt", model, **options)


def test_layout_flag_transposes_weights(tmp_path, capsys):
    weights = small()[0] | {"fc.weight": mx.ones((3, 2))}
    where = paths(tmp_path, {"model": weights})
    assert "fc.weight=transpose" in fails(capsys, *where)
    assert main([*where, "--layout", "*.weight=transpose"]) == 0
    assert read_checkpoint(tmp_path / "run").weights["fc.weight"].shape == (2, 3)


@pytest.mark.parametrize(
    ("config", "word"),
    [
        ({"model_type": "llama", "model_file": "evil.py"}, "needs its own code"),
        ({"model_type": "../../evil"}, "no valid model_type"),
        ({"model_type": "a..b"}, "no valid model_type"),
        ({"model_type": 3}, "no valid model_type"),
        ({}, "no valid model_type"),
        ({"model_type": "nothing_like_it"}, "not supported"),
        ({"model_type": "llama", "hidden_size": "x"}, "raised"),
        ([], "no valid model_type"),
        ("[" * 100_000, "nested too deeply"),
        (None, "No such file"),
    ],
)
def test_model_config_runs_no_code_from_its_folder(config, word, tmp_path, capsys):
    pytest.importorskip("mlx_lm")
    (tmp_path / "evil.py").write_text("raise SystemExit('ran')")
    if config is not None:
        text = config if isinstance(config, str) else json.dumps(config)
        (tmp_path / "config.json").write_text(text)
    where = paths(tmp_path, {"model": small()[0]})
    assert word in fails(capsys, *where, "--model", str(tmp_path))
    assert "evil" not in sys.modules
