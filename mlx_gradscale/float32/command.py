"""The ``mlx_gradscale float32-layers`` command, for mlx-lm models."""

import argparse
import shlex
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx

from ..commands import run_command
from .search import find_float32_layers


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``mlx_gradscale float32-layers`` and return the exit code."""
    expected = (OSError, ValueError, TypeError, ImportError)
    return run_command(lambda: _search(arguments), expected)


def _search(arguments: Sequence[str] | None) -> int:
    options = _parser().parse_args(arguments)
    if not Path(options.model).is_dir():
        raise ValueError(f"--model must be a local folder, got {options.model!r}.")
    if not options.output.endswith(".json"):
        raise ValueError(f"--output must end in .json, got {options.output!r}.")
    found = find_float32_layers(
        *_load(options), margin=options.margin, tolerance=options.tolerance
    )
    print(found)
    if found.problem:
        return 1
    try:
        from ..plot import plot_headroom

        plot_headroom(found, Path(options.output).with_suffix(".png"))
    except ImportError as error:
        print(f"No figure was drawn: {error}")
    if not found.where:
        print(f"\nNo layers need float32, so {options.output} was not written.")
        return 0
    found.save(options.output)
    command = ["mlx_gradscale", "lora", "--train", "--dtype", "float16"]
    command += ["--model", options.model, "--data", options.data]
    command += ["--fine-tune-type", options.fine_tune_type]
    command += ["--float32-layers", options.output]
    print(f"\nSaved to {options.output}. To train with it:\n    {shlex.join(command)}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mlx_gradscale float32-layers",
        description="Find the layers of an mlx-lm model that must compute in float32. "
        "Run a few batches forward and backward in float32 and float16, print and plot "
        "how close the values of each layer come to 65504, and save the layers found.",
        epilog="example: mlx_gradscale float32-layers --model my-model --data my-data",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--model", required=True, help="folder of an mlx-lm model")
    add("--data", required=True, help="folder with train.jsonl, as for mlx-lm")
    add("-o", "--output", default="float32_layers.json", help="JSON file to write")
    kinds = ("lora", "full")
    add("--fine-tune-type", choices=kinds, default="lora", help="weights to train")
    add("--batches", type=int, default=4, help="number of samples to run")
    add("--max-seq-length", type=int, default=512, help="maximum tokens per sample")
    add("--margin", type=float, default=2.0, help="factor by which values may grow")
    add("--tolerance", type=float, default=0.02, help="allowed relative loss error")
    return parser


def _load(options: argparse.Namespace) -> tuple[Any, Any, list[Any]]:
    """Load the model in float16; return it with mlx-lm's loss and the batches."""
    import mlx_lm
    from mlx_lm.tuner.datasets import CacheDataset, load_local_dataset
    from mlx_lm.tuner.trainer import default_loss, iterate_batches
    from mlx_lm.tuner.utils import linear_to_lora_layers

    model, tokenizer = mlx_lm.load(options.model)
    data, *_ = load_local_dataset(Path(options.data), tokenizer, SimpleNamespace())
    if not data:
        raise ValueError(f"{options.data} has no train.jsonl with samples.")
    batches = iterate_batches(CacheDataset(data), 1, options.max_seq_length, seed=0)
    first = list(islice(batches, options.batches))
    if options.fine_tune_type == "lora":
        model.freeze()
        config = {"rank": 8, "scale": 20.0, "dropout": 0.0}
        linear_to_lora_layers(model, len(model.layers), config)
    # Cast after adding the adapters, as mlx_gradscale lora --dtype float16 does.
    model.set_dtype(mx.float16)
    model.train()
    return model, default_loss, [(model, *batch) for batch in first]
