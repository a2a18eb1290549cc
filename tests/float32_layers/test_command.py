"""mlx_gradscale float16: from a model and data to float32 layers and pictures."""

import json

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlx_gradscale import float32_layers
from mlx_gradscale.float32_layers.command import main

mlx_lm = pytest.importorskip("mlx_lm", reason="mlx-lm is not installed")
pytest.importorskip("matplotlib", reason="matplotlib is not installed")
from mlx_lm.models import llama  # noqa: E402
from mlx_lm.tuner.trainer import default_loss  # noqa: E402
from tokenizers import Tokenizer, models, pre_tokenizers  # noqa: E402
from transformers import PreTrainedTokenizerFast  # noqa: E402

WORDS = ["<unk>", "<s>", "</s>", *"abcdefghijklmnopqrstuvwxyz"]
CONFIG = {
    "model_type": "llama",
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "rms_norm_eps": 1e-5,
    "vocab_size": len(WORDS),
    "tie_word_embeddings": True,
}


def make_model():
    mx.random.seed(0)
    model = llama.Model(llama.ModelArgs.from_dict(CONFIG))
    mlp = model.model.layers[1].mlp
    mlp.gate_proj.weight *= 500
    mlp.up_proj.weight *= 500
    mlp.down_proj.weight *= 1e-3
    return model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    weights = dict(tree_flatten(make_model().parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(CONFIG))
    vocabulary = {word: i for i, word in enumerate(WORDS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>"
    ).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    rng = np.random.default_rng(0)
    lines = [
        json.dumps({"text": " ".join(rng.choice(WORDS[3:], size))})
        for size in (12, 20, 30, 40)
    ]
    (folder / "train.jsonl").write_text("\n".join(lines))
    return folder


def run(folder, data, *more):
    return main(["--model", str(folder), "--data", str(data), *more])


@pytest.mark.parametrize("kind", ["full", "lora"])
def test_layers_are_written_drawn_and_usable(folder, data, tmp_path, capsys, kind):
    output = tmp_path / "layers.json"
    more = ["--batches", "2", "--batch-size", "2", "--fine-tune-type", kind]
    assert run(folder, data, "-o", str(output), *more) == 0
    out = capsys.readouterr().out
    assert "model.layers.1.mlp" in out
    assert f'float32_layers(model, "{output}")' in out
    assert {path.name for path in tmp_path.iterdir()} == {"layers.json", "layers.png"}
    assert json.loads(output.read_text())["layers"] == ["model.layers.1.mlp"]
    model = make_model()
    model.set_dtype(mx.float16)
    float32_layers(model, output)
    tokens, lengths = mx.arange(16)[None] % 29, mx.array([[0, 16]])
    (loss, _), _ = nn.value_and_grad(model, default_loss)(model, tokens, lengths)
    assert mx.isfinite(loss).item()


BAD = {
    "no model": (["--model", "nowhere"], "must be a folder"),
    "no data": (["--data", "nowhere"], "has no train.jsonl"),
    "no batches": (["--batches", "0"], "--batches"),
    "margin": (["--margin", "0.5"], "margin must be finite and at least 1"),
    "output": (["-o", "layers.txt"], "must end in .json"),
    "too few": (["--batch-size", "99"], "at least batch_size=99"),
}


@pytest.mark.parametrize("name", list(BAD))
def test_wrong_argument_is_reported(folder, data, tmp_path, capsys, name, monkeypatch):
    monkeypatch.chdir(tmp_path)
    arguments, message = BAD[name]
    assert run(folder, data, *arguments) == 1
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_exit_code_is_1_where_no_layers_help(folder, data, tmp_path, capsys):
    broken = tmp_path / "model"
    broken.mkdir()
    for path in folder.iterdir():
        (broken / path.name).write_bytes(path.read_bytes())
    weights = mx.load(str(broken / "model.safetensors"))
    weights["model.norm.weight"] = mx.full((32,), float("nan"))
    mx.eval(weights)
    mx.save_safetensors(str(broken / "model.safetensors"), weights, {"format": "mlx"})
    assert run(broken, data, "-o", str(tmp_path / "layers.json")) == 1
    assert "contain NaN or inf in model.norm.weight" in capsys.readouterr().out
    assert not (tmp_path / "layers.json").exists()
