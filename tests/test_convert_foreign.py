"""Objects of other programs' classes, through convert and inspect."""

import argparse
import collections
import dataclasses
import enum
import functools
import json
import pathlib
import random

import mlx.core as mx
import numpy as np
import pytest

from mlx_gradscale import torch_checkpoint
from mlx_gradscale.convert import from_torch, read_run, to_torch, write_run
from mlx_gradscale.convert.command import main as convert
from mlx_gradscale.convert.conversion import Options
from mlx_gradscale.inspect import describe
from mlx_gradscale.inspect import main as inspect
from mlx_gradscale.run_folder.values import decode, encode

torch = pytest.importorskip("torch")


class Mode(enum.Enum):
    FAST = "fast"


@dataclasses.dataclass
class Settings:
    width: int = 8
    mode: Mode = Mode.FAST


def trained():
    torch.manual_seed(0)
    model = torch.nn.ModuleDict({"fc": torch.nn.Linear(3, 2)})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model["fc"](torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return model, optimizer


def checkpoint(**more):
    model, optimizer = trained()
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), **more}


EXTRA = {
    "args": argparse.Namespace(lr=0.1, output=pathlib.Path("/runs/1")),
    "config": Settings(4),
    "make": functools.partial(Settings, width=3),
    "best": np.float64(0.75),
    "rng": [random.getstate(), np.arange(5, dtype=np.uint32)],
    "counts": collections.defaultdict(int, {"a": 1}),
    "types": {"dtype": torch.bfloat16, "device": torch.device("cuda", 0)},
    "size": torch.Size([2, 3]),
    "by mode": {Mode.FAST: 1.5, np.int64(3): 2.5},
}


def there_and_back(tmp_path, found):
    start, run, end = tmp_path / "a.pt", tmp_path / "run", tmp_path / "b.pt"
    torch.save(found, start)
    assert convert(["--torch-path", str(start), "--mlx-path", str(run)]) == 0
    assert convert(["--torch-path", str(end), "--mlx-path", str(run)]) == 0
    return torch.load(end, weights_only=False)


def test_they_come_back_as_they_were(tmp_path, capsys):
    back = there_and_back(tmp_path, checkpoint(**EXTRA))
    for key in EXTRA.keys() - {"rng", "make"}:
        assert back[key] == EXTRA[key], key
        assert type(back[key]) is type(EXTRA[key]), key
    assert back["make"]() == Settings(3)
    assert back["counts"]["new"] == 0
    assert back["rng"][0] == EXTRA["rng"][0]
    assert back["rng"][1].dtype == np.uint32
    assert np.array_equal(back["rng"][1], EXTRA["rng"][1])
    lines = capsys.readouterr().err.splitlines()
    named = [line for line in lines if "Kept for the way back as they are" in line]
    assert len(named) == 1
    assert (
        "args (argparse.Namespace), config (test_convert_foreign.Settings)" in named[0]
    )
    assert "best (numpy scalar)" in named[0]


def test_a_default_dict_around_the_model_keeps_its_factory(tmp_path):
    found = collections.defaultdict(list, checkpoint())
    assert there_and_back(tmp_path, found)["new"] == []


def test_inspect_shows_them(tmp_path, capsys):
    torch.save(checkpoint(**EXTRA), tmp_path / "a.pt")
    rest = describe(tmp_path / "a.pt")["rest"]
    assert rest["args"] == {"lr": 0.1, "output": "/runs/1"}
    assert rest["config"].startswith("test_convert_foreign.Settings(width=4, mode=")
    assert rest["best"] == 0.75
    assert rest["rng"][1] == "numpy uint32 5"
    assert rest["types"] == {"dtype": "torch.bfloat16", "device": "cuda:0"}
    assert rest["by mode"]["3"] == 2.5
    assert inspect([str(tmp_path / "a.pt"), "--json"]) == 0
    json.loads(capsys.readouterr().out)


def test_inspect_of_an_optimizer_that_cannot_be_read(tmp_path):
    found = checkpoint()
    found["optimizer"]["param_groups"][0]["lr"] = Settings(3)
    torch.save(found, tmp_path / "a.pt")
    said = describe(tmp_path / "a.pt")
    assert [tensor["name"] for tensor in said["tensors"]] == ["fc.weight", "fc.bias"]
    group = said["rest"]["optimizer"]["param_groups"][0]
    assert group["lr"].startswith("test_convert_foreign.Settings(width=3")


def test_inspect_of_an_object_that_holds_itself(tmp_path, capsys):
    args = argparse.Namespace(lr=0.1)
    args.itself = args
    torch.save({"args": args}, tmp_path / "a.pt")
    assert inspect([str(tmp_path / "a.pt")]) == 0
    assert "lr" in capsys.readouterr().out
    assert there_and_back(tmp_path, checkpoint(args=args))["args"].itself.lr == 0.1


def test_numpy_numbers_are_numbers_in_the_optimizer():
    found = checkpoint()
    group = found["optimizer"]["param_groups"][0]
    group["lr"], group["betas"] = np.float64(0.5), (np.float32(0.5), 0.75)
    group["note"] = Settings(1)  # nothing that is needed
    loaded = torch_checkpoint.load(torch_bytes(found))
    run = from_torch(loaded, options=Options(accept=("note",)))
    assert run.optimizer["learning_rate"].item() == 0.5
    back, _ = to_torch(run)
    assert back["optimizer"]["param_groups"][0]["betas"] == (0.5, 0.75)


def torch_bytes(obj):
    import io

    buffer = io.BytesIO()
    torch.save(obj, buffer)
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("place", "value", "says"),
    [
        (
            ("optimizer", "param_groups", 0, "lr"),
            Settings(),
            "lr is .*Settings.* number",
        ),
        (
            ("optimizer", "param_groups", 0, "lr"),
            np.ones(2),
            "numpy.ndarray.* a number",
        ),
        (
            ("optimizer", "state", 0, "exp_avg"),
            np.ones(2),
            "exp_avg is numpy.* a tensor",
        ),
        (("model", "fc.bias"), np.ones(2), "fc.bias"),
    ],
)
def test_in_the_place_of_a_tensor_or_a_number_they_are_errors(place, value, says):
    found = checkpoint()
    inner = found
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    loaded = torch_checkpoint.load(torch_bytes(found))
    with pytest.raises(ValueError, match=says):
        from_torch(loaded)


def test_a_scaler_whose_scale_is_an_object():
    scaler = {"scale": Settings(), "growth_factor": 2.0, "backoff_factor": 0.5}
    scaler |= {"growth_interval": 2000, "_growth_tracker": 0}
    loaded = torch_checkpoint.load(torch_bytes(checkpoint(scaler=scaler)))
    with pytest.raises(ValueError, match=r"scaler/scale is .*Settings, where a number"):
        from_torch(loaded)
    scaler["scale"] = np.float32(512)
    loaded = torch_checkpoint.load(torch_bytes(checkpoint(scaler=scaler)))
    assert from_torch(loaded).scaler["scale"] == 512.0


def test_a_whole_model_is_told_from_a_state_dict():
    model, _ = trained()
    for found in (model, {"model": model, "epoch": 3}):
        loaded = torch_checkpoint.load(torch_bytes(found))
        with pytest.raises(ValueError, match=r"whole PyTorch model.*state_dict\(\)"):
            from_torch(loaded)


def test_tensors_inside_go_to_the_other_file(tmp_path):
    found = checkpoint(ema=argparse.Namespace(w=torch.nn.Parameter(torch.ones(100))))
    run = from_torch(torch_checkpoint.load(torch_bytes(found)))
    write_run(tmp_path / "run", run)
    assert (tmp_path / "run" / "extra.safetensors").exists()
    kept = read_run(tmp_path / "run").record.checkpoint["ema"]
    assert mx.array_equal(kept.state["w"].array, mx.ones(100))
    assert kept.state["w"].is_parameter


@pytest.mark.parametrize(
    "held",
    [
        {"$torch": "torch.load"},
        {"$torch": "torch.float16\nos\nsystem\n"},
        {"$torch": "torch.hub.load"},
        {"$torch": 3},
        {"$size": [-1]},
        {"$size": ["x"]},
        {"$default": [3, {}]},
        {"$object": {"is": "x", "pickle": ""}},
        {"$object": {"is": "x", "pickle": "gAJLAS4="}},  # the number 1
        {"$object": {"is": "x", "pickle": "gAJjb3MKc3lzdGVtCi5OLg=="}},  # and more
    ],
)
def test_training_json_that_lies(held):
    with pytest.raises(ValueError, match=r"dtype|other types|defaultdict|Pickle|kept"):
        decode(held, {})


def test_json_keeps_them():
    loaded = torch_checkpoint.load(torch_bytes(EXTRA))
    arrays: dict[str, mx.array] = {}
    text = json.dumps(encode(loaded, arrays))
    back = torch_checkpoint.save_bytes(decode(json.loads(text), arrays))
    import io

    found = torch.load(io.BytesIO(back), weights_only=False)
    assert found["args"] == EXTRA["args"]
    assert found["by mode"] == EXTRA["by mode"]
