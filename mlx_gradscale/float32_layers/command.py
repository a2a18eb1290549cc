"""The command ``mlx_gradscale float16``: can this mlx-lm model train in float16?"""

import argparse
import json
import sys
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..commands import run_command
from .report import Float32Search
from .search import find_float32_layers


def main(arguments: Sequence[str] | None = None) -> int:
    """Find the layers of an mlx-lm model that must be float32, and write them.

    Args:
        arguments (list): Default: those of the process.

    Returns:
        int: 0, or 1 if no layers help or an argument is wrong.
    """
    expected = (OSError, ValueError, TypeError, ImportError)
    return run_command(lambda: _search(arguments), expected, "mlx_gradscale float16: ")


def _search(arguments: Sequence[str] | None) -> int:
    options = _parser().parse_args(arguments)
    model, loss_fn, batches = _load(options)
    found = find_float32_layers(
        model,
        loss_fn,
        batches,
        margin=options.margin,
        tolerance=options.tolerance,
        progress=_show if sys.stderr.isatty() else None,
    )
    print(found)
    if not found.helps:
        return 1
    found.save(options.output)
    print(f"\n{options.output}")
    _draw(found, Path(options.output))
    print(
        "\nBefore training, and before LoRA layers are made:\n"
        f'    mlx_gradscale.float32_layers(model, "{options.output}")'
    )
    return 0


def _show(line: str) -> None:
    print(line, file=sys.stderr)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mlx_gradscale float16",
        description="Run batches through an mlx-lm model, forward and backward, in "
        "float32 and float16. Print how close each layer is to 65504, draw it, and "
        "write the layers that must compute in float32 to a file.",
        epilog="example: mlx_gradscale float16 --model my-model --data my-data",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--model", required=True, help="a folder with an mlx-lm model")
    add("--data", required=True, help="a .jsonl file, or a folder with train.jsonl")
    add("-o", "--output", default="float32_layers.json", help="the file to write")
    add("--fine-tune-type", choices=("full", "lora"), default="full")
    add("--batches", type=int, default=4, metavar="N", help="how many to run")
    add("--batch-size", type=int, default=1, metavar="N", help="samples each")
    add("--max-seq-length", type=int, default=512, metavar="N", help="tokens")
    add("--margin", type=float, default=2.0, help="how much larger values may become")
    add("--tolerance", type=float, default=0.02, help="allowed distance of the loss")
    return parser


def _load(options: argparse.Namespace) -> tuple[nn.Module, Any, list[Any]]:
    if not Path(options.model).is_dir():
        raise ValueError(f"--model must be a folder, got {options.model!r}.")
    for name in ("batches", "batch_size", "max_seq_length"):
        if getattr(options, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1.")
    if not options.output.endswith(".json"):
        raise ValueError(f"--output must end in .json, got {options.output!r}.")
    try:
        import mlx_lm
        from mlx_lm.tuner.trainer import default_loss
        from mlx_lm.tuner.utils import linear_to_lora_layers
    except ImportError as error:
        raise ImportError("This command needs mlx-lm: pip install mlx-lm.") from error
    model, tokenizer = mlx_lm.load(options.model)
    batches = _batches(options, tokenizer)
    # Before the adapters, which mlx-lm makes in float32.
    model.set_dtype(mx.float16)
    if options.fine_tune_type == "lora":
        model.freeze()
        config = {"rank": 8, "scale": 20.0, "dropout": 0.0}
        linear_to_lora_layers(model, len(model.layers), config)
    model.train()
    return model, default_loss, [(model, *batch) for batch in batches]


def _batches(options: argparse.Namespace, tokenizer: Any) -> list[Any]:
    """Return batches as mlx-lm's trainer makes them."""
    from mlx_lm.tuner.datasets import CacheDataset, create_dataset, load_local_dataset
    from mlx_lm.tuner.trainer import iterate_batches

    path, plain = Path(options.data), SimpleNamespace()
    if path.is_dir():
        found = load_local_dataset(path, tokenizer, plain)
        dataset = next((each for each in found if len(each)), None)
    else:
        with open(path, encoding="utf-8") as file:
            rows = [json.loads(line) for line in file if line.strip()]
        dataset = create_dataset(rows, tokenizer, plain) if rows else None
    if not dataset:
        raise ValueError(f"There are no samples in {options.data}.")
    batches = iterate_batches(
        CacheDataset(dataset), options.batch_size, options.max_seq_length, seed=0
    )
    return list(islice(batches, options.batches))


def _draw(found: Float32Search, output: Path) -> None:
    try:
        from ..plot import plot_headroom

        for theme in ("light", "dark"):
            picture = output.with_name(f"{output.stem}-{theme}.png")
            plot_headroom(found, picture, dark=theme == "dark")
            print(picture)
    except ImportError as error:
        print(f"No picture: {error}")
