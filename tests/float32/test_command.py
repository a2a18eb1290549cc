"""``mlx_gradscale float32-layers``: from a model and data to layers and pictures."""

import json

import mlx.core as mx
import mlx.nn as nn
import pytest

from mlx_gradscale import float32_layers
from mlx_gradscale.float32.command import _parser, main

mlx_lm = pytest.importorskip("mlx_lm", reason="mlx-lm is not installed")
pytest.importorskip("matplotlib", reason="matplotlib is not installed")
from mlx_lm.lora import CONFIG_DEFAULTS  # noqa: E402
from mlx_lm.tuner.trainer import default_loss  # noqa: E402
from support.lora_parts import make_data, make_model  # noqa: E402

MLP = "model.layers.1.mlp"
OVERFLOW = {"gate_proj": 300, "up_proj": 300, "down_proj": 1e-3}
FACTORS = {f"{MLP}.{name}.weight": factor for name, factor in OVERFLOW.items()}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    root = tmp_path_factory.mktemp("command")
    folder, data = root / "model", make_data(root / "data", rows=4)
    make_model(folder)
    path = str(folder / "model.safetensors")
    weights = mx.load(path)
    mx.eval(weights)

    def run_command(factors, *more):
        """Multiply weights of a model by factors and run the command on it."""
        changed = {name: weights[name] * by for name, by in factors.items()}
        mx.save_safetensors(path, weights | changed, {"format": "mlx"})
        arguments = ["--model", str(folder), "--data", str(data), "--batches", "2"]
        return main([*arguments, *more]), mlx_lm.load(str(folder))[0]

    return run_command


@pytest.mark.parametrize("kind", ["full", "lora"])
def test_float16_command_writes_layers_that_fix_the_model(run, tmp_path, capsys, kind):
    output = tmp_path / "layers.json"
    code, model = run(FACTORS, "-o", str(output), "--fine-tune-type", kind)
    assert code == 0
    printed = capsys.readouterr()
    assert f"--fine-tune-type {kind} --float32-layers {output}\n" in printed.out
    assert {path.name for path in tmp_path.iterdir()} == {"layers.json", "layers.png"}
    assert json.loads(output.read_text())["layers"] == [MLP]
    model.set_dtype(mx.float16)
    float32_layers(model, output)
    tokens, lengths = mx.arange(16)[None], mx.array([[0, 16]])
    (loss, _), _ = nn.value_and_grad(model, default_loss)(model, tokens, lengths)
    assert mx.isfinite(loss).item()


def test_float16_command_trains_the_same_weights_as_mlx_lm_by_default():
    options = _parser().parse_args(["--model", "a", "--data", "b"])
    assert options.fine_tune_type == CONFIG_DEFAULTS["fine_tune_type"]


def test_float16_command_writes_no_file_without_an_overflow(run, tmp_path, capsys):
    code, _ = run({}, "-o", str(tmp_path / "layers.json"))
    assert code == 0
    assert "layers.json was not written" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["layers.png"]


BAD = {
    "no model": (["--model", "nowhere"], "must be a local folder"),
    "no data": (["--data", "nowhere"], "has no train.jsonl"),
    "no batches": (["--batches", "0"], "batches is empty"),
    "margin": (["--margin", "0.5"], "margin must be finite and at least 1"),
    "output": (["-o", "layers.txt"], "must end in .json"),
}


@pytest.mark.parametrize("name", list(BAD))
def test_float16_command_rejects_bad_argument(run, tmp_path, capsys, name, monkeypatch):
    monkeypatch.chdir(tmp_path)
    arguments, message = BAD[name]
    assert run({}, *arguments)[0] == 1
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("factor", [float("nan"), 1e30])
def test_float16_command_exits_with_1_if_no_layers_help(run, tmp_path, capsys, factor):
    factors = {"model.norm.weight": mx.array(factor)}
    assert run(factors, "-o", str(tmp_path / "layers.json"))[0] == 1
    said = capsys.readouterr().out
    assert "contain NaN or inf in model.norm.weight" in said
    # A finite weight that overflows in the cast is no reason to restore a checkpoint.
    assert "if a cast to float16 made them inf, train in" in said
    assert not list(tmp_path.iterdir())
