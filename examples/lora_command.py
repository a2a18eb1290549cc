"""Fine-tune all weights of a model in float16 with mlx_gradscale lora, and resume.

``mlx_gradscale lora`` accepts all flags of ``mlx_lm.lora`` and adds a few. This script
generates a model, a tokenizer and data, so nothing is downloaded. For your model, run

    mlx_gradscale lora --model MODEL --train --data DATA --fine-tune-type full \\
        --dtype float16 --max-grad-norm 1.0 --history run.csv

Run this script with

    python examples/lora_command.py
"""

import argparse
import json
import pydoc_data.topics
import tempfile
from pathlib import Path

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models import llama
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from mlx_gradscale.__main__ import main as mlx_gradscale

CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "vocab_size": 258,
    "tie_word_embeddings": False,
}


def make_model(folder: Path) -> Path:
    folder.mkdir()
    mx.random.seed(0)
    model = llama.Model(llama.ModelArgs.from_dict(CONFIG))
    weights = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(CONFIG))
    alphabet = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "<s>", "</s>"]
    vocabulary = {character: i for i, character in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>"
    ).save_pretrained(folder)
    return folder


def make_data(folder: Path, length: int = 24) -> Path:
    folder.mkdir()
    text = "\n".join(pydoc_data.topics.topics.values())
    rows = [{"text": text[i * length : (i + 1) * length]} for i in range(72)]
    for name, part in (("valid", rows[:8]), ("train", rows[8:])):
        lines = "".join(json.dumps(row) + "\n" for row in part)
        (folder / f"{name}.jsonl").write_text(lines)
    return folder


def main(arguments: list[str] | None = None) -> list[str]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--iters", type=int, default=40)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        command = [
            "lora",
            "--train",
            "--fine-tune-type",
            "full",
            "--optimizer",
            "adamw",
        ]
        command += ["--model", str(make_model(folder / "model"))]
        command += ["--data", str(make_data(folder / "data"))]
        command += ["--adapter-path", str(folder / "adapters")]
        command += ["--num-layers", "2", "--batch-size", "4", "--max-seq-length", "64"]
        command += ["--learning-rate", "3e-3", "--val-batches", "2"]
        # Flags that mlx-lm does not have:
        command += ["--dtype", "float16", "--max-grad-norm", "1.0"]
        command += ["--history", str(folder / "run.csv")]
        half = options.iters // 2
        mlx_gradscale([*command, "--iters", str(half)])
        mlx_gradscale([*command, "--iters", str(options.iters), "--resume"])
        return (folder / "run.csv").read_text().splitlines()


if __name__ == "__main__":
    print("\n".join(main()[-3:]))
