"""What a model's sanitize does is found by trying it, or refused."""

import json
import sys

import mlx.core as mx
import mlx.nn as nn
import pytest
from convert_helpers import fails, paths, small

from mlx_gradscale.convert import Options, from_torch, main, read_run, to_torch
from mlx_gradscale.convert.layouts import Choices, make_plan
from mlx_gradscale.convert.layouts.sanitized import sanitized

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


def test_names_and_axes_are_found():
    before = dict(SHAPES)
    found = sanitized(Model(), SHAPES)
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
def test_what_does_more_is_refused(way):
    model = nn.Module()
    model.sanitize = way
    with pytest.raises(ValueError, match=r"sanitize|axes"):
        sanitized(model, SHAPES)


class Turned(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(2, 2)

    def sanitize(self, weights):
        return {k: v.T if v.ndim == 2 else v for k, v in weights.items() if k != "rope"}


def test_moments_are_turned_with_their_weights():
    model = {"fc.weight": mx.array([[1.0, 2.0], [3.0, 4.0]]), "fc.bias": mx.zeros(2)}
    model["rope"] = mx.ones(3)
    optimizer = small()[1]
    moment = mx.array([[5.0, 6.0], [7.0, 8.0]])
    optimizer["state"][0]["momentum_buffer"] = moment
    checkpoint = {"model": {f"module.{k}": v for k, v in model.items()}}
    checkpoint["opt"] = optimizer
    names = ("module.fc.weight", "module.fc.bias")
    run = from_torch(checkpoint, Turned(), Options(names=names))
    assert run.weights["fc.weight"].tolist() == [[1.0, 3.0], [2.0, 4.0]]
    assert run.optimizer["fc.weight.v"].tolist() == [[5.0, 7.0], [6.0, 8.0]]
    assert list(run.record.model.unplaced) == ["module.rope"]
    back, _ = to_torch(run)
    assert back["model"].keys() == checkpoint["model"].keys()
    assert mx.array_equal(back["model"]["module.fc.weight"], model["fc.weight"])
    assert mx.array_equal(back["opt"]["state"][0]["momentum_buffer"], moment)


def test_weights_can_be_turned_by_hand(tmp_path, capsys):
    where = paths(tmp_path, {"model": small()[0]})
    assert main([*where, "--transpose", "*.weight"]) == 0
    assert read_run(tmp_path / "run").weights["fc.weight"].shape == (3, 2)
    plan = make_plan(small()[0], None, Choices(transpose=("fc.weight",)))
    assert plan.entries["fc.weight"].layout == "transpose"
    flags = ["--transpose", "nothing", "--overwrite", "--to", "mlx"]
    assert "matches no tensor" in fails(capsys, *where, *flags)


@pytest.mark.parametrize(
    ("config", "word"),
    [
        ({"model_type": "llama", "model_file": "evil.py"}, "code of its own"),
        ({"model_type": "../../evil"}, "code of its own"),
        ({"model_type": "a..b"}, "code of its own"),
        ({"model_type": 3}, "code of its own"),
        ({}, "code of its own"),
        ({"model_type": "nothing_like_it"}, "not supported"),
        ({"model_type": "llama", "hidden_size": "x"}, "mlx-lm raised"),
        ([], "no model's config"),
    ],
)
def test_a_config_runs_no_code_of_its_folder(config, word, tmp_path, capsys):
    pytest.importorskip("mlx_lm")
    (tmp_path / "evil.py").write_text("raise SystemExit('ran')")
    (tmp_path / "config.json").write_text(json.dumps(config))
    where = paths(tmp_path, {"model": small()[0]})
    assert word in fails(capsys, *where, "--model", str(tmp_path))
    assert "evil" not in sys.modules


def test_a_config_that_is_not_there_is_told(tmp_path, capsys):
    where = paths(tmp_path, {"model": small()[0]})
    assert "there is no" in fails(capsys, *where, "--model", str(tmp_path))
    (tmp_path / "config.json").write_text("[" * 100_000)
    assert "is not JSON" in fails(capsys, *where, "--model", str(tmp_path))
