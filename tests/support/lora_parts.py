"""A model folder, a tokenizer and rows of text for mlx-lm's command, made here."""

import json
import pydoc_data.topics

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models import llama
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

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
BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())


def make_model(folder, dtype=mx.float16, quantize=False):
    """Write a Llama with random weights, and a tokenizer of one token per byte."""
    folder.mkdir()
    mx.random.seed(7)
    config = dict(CONFIG)
    model = llama.Model(llama.ModelArgs.from_dict(config))
    model.set_dtype(dtype)
    if quantize:
        from mlx_lm.utils import quantize_model

        model, config = quantize_model(model, config, group_size=32, bits=4)
    weights = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(config))
    tokens = {character: i for i, character in enumerate(BYTES)} | {"<s>": 256}
    tokenizer = Tokenizer(models.BPE(vocab=tokens | {"</s>": 257}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>"
    ).save_pretrained(folder)
    return folder


def make_data(folder, length=24, rows=36):
    folder.mkdir()
    text = "\n".join(pydoc_data.topics.topics.values())
    cut = [text[i * length : (i + 1) * length] for i in range(rows + 8)]
    parts = {"train": cut[8:], "valid": cut[:8], "test": cut[:8]}
    for name, part in parts.items():
        lines = "".join(json.dumps({"text": row}) + "\n" for row in part)
        (folder / f"{name}.jsonl").write_text(lines)
    return folder


def make_texts(length=32, rows=64):
    text = "\n".join(pydoc_data.topics.topics.values())
    text = text.encode("ascii", "replace").decode()
    return [text[i * length : (i + 1) * length] for i in range(rows)]


def make_rows(rows=64, skip=0):
    """The same as (tokens, offset of the first to learn), 8 of them for validation."""
    split = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    found = []
    for text in make_texts(rows=rows + skip)[skip:]:
        [(characters, _)] = split.pre_tokenize_str(text)
        found.append(([BYTES.index(character) for character in characters], 0))
    return found[8:], found[:8]
