"""What the inspect command says of each kind of file."""

import json
from pathlib import Path

import mlx.core as mx
import pytest

from mlx_gradscale import torch_checkpoint
from mlx_gradscale.convert import from_torch, read_torch, write_run
from mlx_gradscale.inspect import describe, main

GOLDEN = Path(__file__).parent / "golden_convert"


def said(capsys, *arguments):
    assert main([str(a) for a in arguments]) == 0
    return capsys.readouterr().out


def test_a_pytorch_checkpoint(capsys):
    text = said(capsys, GOLDEN / "conv_adamw.pt")
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert lines[0].endswith("conv_adamw.pt: PyTorch checkpoint")
    assert "features.0.weight 4x2x3x3 float32 288 B" in lines
    assert "16 tensors, 2.3 kB" in lines
    assert "optimizer AdamW" in lines
    assert "step 6" in lines
    assert any(line.startswith("group 0 10 parameters, lr=0.01") for line in lines)
    assert "scale 512.0" in lines
    assert "epoch 3" in lines


def test_json_says_the_same(capsys):
    found = json.loads(said(capsys, GOLDEN / "conv_adamw.pt", "--json"))
    assert found == json.loads(json.dumps(describe(GOLDEN / "conv_adamw.pt")))
    assert found["tensors"][0] == {
        "name": "features.0.weight",
        "shape": [4, 2, 3, 3],
        "dtype": "float32",
        "bytes": 288,
    }
    assert found["optimizer"]["name"] == "AdamW"
    assert found["optimizer"]["steps"] == [6]
    assert found["optimizer"]["groups"][0]["params"] == 10
    assert found["scaler"]["_growth_tracker"] == 3
    assert found["rest"] == {"epoch": 3, "history": [[0, 1.5], [1, 1.25]]}


def test_a_converted_folder_and_its_files(tmp_path, capsys):
    checkpoint, _ = read_torch(GOLDEN / "transformer_sgd.pt")
    del checkpoint["model"]["blocks.0.attention.in_proj_weight"]
    checkpoint["model"].pop("position")
    checkpoint.pop("optimizer")
    write_run(tmp_path / "run", from_torch(checkpoint))
    found = describe(tmp_path / "run")
    assert found["kind"] == "MLX run"
    names = [tensor["name"] for tensor in found["tensors"]]
    assert names == sorted(names)
    assert found["scaler"]["scale"] == 512.0
    assert found["rest"]["epoch"] == 3
    found = describe(tmp_path / "run" / "model.safetensors")
    assert (found["kind"], found["metadata"]) == ("safetensors", {"format": "mlx"})
    found = describe(tmp_path / "run" / "scaler.json")
    assert found["scaler"]["growth_interval"] == 4


def test_an_mlx_optimizer_file(tmp_path):
    path = tmp_path / "optimizer.safetensors"
    arrays = {f"layers.{i}.w.v": mx.zeros(4) for i in (10, 2)}
    arrays |= {"step": mx.array(7, mx.uint64), "learning_rate": mx.array(0.5)}
    mx.save_safetensors(str(path), arrays)
    found = describe(path)
    assert found["optimizer"] == {
        "steps": [7],
        "learning_rates": [0.5],
        "slots": ["v"],
        "bytes": 44,
    }
    names = [tensor["name"] for tensor in found["tensors"]]
    assert names.index("layers.2.w.v") < names.index("layers.10.w.v")


def test_a_converted_folder_with_groups(tmp_path, capsys):
    torch = pytest.importorskip("torch")
    layer = torch.nn.Linear(3, 2)
    groups = [{"params": [layer.weight], "lr": 0.5}, {"params": [layer.bias]}]
    optimizer = torch.optim.Adam(groups, lr=0.25)
    layer(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    checkpoint = {"model": layer.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(checkpoint, tmp_path / "a.pt")
    write_run(tmp_path / "run", from_torch(read_torch(tmp_path / "a.pt")[0]))
    found = describe(tmp_path / "run")["optimizer"]
    assert (found["name"], found["steps"]) == ("Adam", [1, 1])
    assert found["learning_rates"] == [0.5, 0.25]
    assert "learning rate  0.5, 0.25" in said(capsys, tmp_path / "run")


def test_unknown_parts_are_still_listed(tmp_path):
    checkpoint = {
        "a": {"w": mx.zeros((2, 2))},
        "b": {"w": mx.zeros(1)},
        "nan": float("nan"),
        "raw": b"xyz",
        "optimizer": {
            "state": {0: {"strange": mx.zeros(3)}},
            "param_groups": [{"params": [0], "lr": 0.1}],
        },
    }
    torch_checkpoint.save(tmp_path / "a.pt", checkpoint)
    found = describe(tmp_path / "a.pt")
    assert found["rest"]["a"] == {"w": "float32 2x2"}
    assert found["rest"]["nan"] == "nan"
    assert found["rest"]["raw"] == "3 bytes"
    json.dumps(found, allow_nan=False)
    del checkpoint["b"]
    torch_checkpoint.save(tmp_path / "a.pt", checkpoint)
    assert describe(tmp_path / "a.pt")["optimizer"]["name"] == "unknown"


def test_control_characters_are_escaped(tmp_path, capsys):
    odd = "w\x1b[2J\n\u202e"
    checkpoint = {"model": {odd: mx.zeros(2)}, "note\x07": "a\r\x1b]0;b"}
    torch_checkpoint.save(tmp_path / "a.pt", checkpoint)
    text = said(capsys, tmp_path / "a.pt")
    assert all(c.isprintable() or c == "\n" for c in text)
    assert r"w\x1b[2J\n\u202e" in text
    assert r"a\r\x1b]0;b" in text


def test_what_is_no_dict_is_told(tmp_path, capsys):
    file = tmp_path / "a.pt"
    for value, words in (
        (mx.zeros((2, 3)), "2x3"),
        ([mx.zeros((4, 5)), 7], "float32 4x5"),
        ("text", "text"),
        ({}, "empty"),
        ({"z": mx.array(1j), "inf": mx.array(float("inf"))}, "inf"),
    ):
        torch_checkpoint.save(file, value)
        assert words in said(capsys, file)
        json.loads(said(capsys, file, "--json"), parse_constant=pytest.fail)


def test_errors_are_one_line(tmp_path, capsys):
    for name in ("missing.pt", "bad.pt", "bad.safetensors", "bad.json"):
        if name.startswith("bad"):
            (tmp_path / name).write_bytes(b"garbage")
        assert main([str(tmp_path / name)]) == 1
        text = capsys.readouterr().err
        assert text.startswith("error: ")
        assert text.count("\n") == 1


def test_a_model_with_values_that_are_no_tensors(tmp_path):
    model = {"fc.weight": mx.ones((3, 4)), "fc._extra_state": {"a": 1}, "temp": 1.0}
    torch_checkpoint.save(tmp_path / "run.pt", {"model": model, "epoch": 3})
    (tensor,) = describe(tmp_path / "run.pt")["tensors"]
    assert tensor["name"] == "fc.weight"
