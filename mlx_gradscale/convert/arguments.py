"""The flags of ``mlx_gradscale.convert``, as a table."""

import argparse
from pathlib import Path
from typing import Any

from ..formats import FORMATS
from .optimizers import ROWS
from .optimizers.compare import ACCEPTED


def _pattern(help: str) -> dict[str, Any]:
    return {"action": "append", "default": [], "metavar": "PATTERN", "help": help}


def _switch(help: str) -> dict[str, Any]:
    return {"action": "store_true", "help": help}


def _key(section: str) -> dict[str, Any]:
    help = (
        f"where the {section} state is in the checkpoint; '' leaves it out; several, "
        "with commas, become a run each in the folder"
    )
    return {"metavar": "KEY/KEY", "help": help}


_PATHS: dict[str, dict[str, Any]] = {
    "--torch-path": {
        "required": True,
        "type": Path,
        "help": "a .pt file, or a folder as Accelerate and Transformers' Trainer write "
        "it",
    },
    "--mlx-path": {"required": True, "type": Path, "help": "a folder"},
    "--to": {"choices": ("mlx", "torch"), "help": "needed where both paths exist"},
    "--overwrite": _switch("replace the run that is there; other files stay"),
    "--dry-run": _switch("print the plan and write nothing"),
}
_LAYOUTS: dict[str, dict[str, Any]] = {
    "--model": {
        "metavar": "MODULE:NAME or PATH",
        "help": "the MLX model, or a function that makes it: names, layouts and "
        "shapes come from its layers; or an mlx-lm model's folder or config.json. "
        "MODULE:NAME imports the module and calls the function: "
        "it runs their code, which nothing else here does with any file",
    },
    "--conv": _pattern("convolution weights"),
    "--conv-transpose": _pattern("weights of transposed convolutions"),
    "--split-qkv": _pattern("fused attention weights to split in three"),
    "--transpose": _pattern("weights that are (in, out) in PyTorch, as GPT-2's"),
    "--keep-layout": _pattern("tensors of 3 and more dimensions to leave as they are"),
    "--drop": _pattern("tensors the MLX model does not have"),
    "--rename": {
        "action": "append",
        "default": [],
        "metavar": "OLD=NEW",
        "help": "a regular expression on PyTorch names, and its replacement, which "
        "is all after the last =",
    },
}
_REST: dict[str, dict[str, Any]] = {
    "--model-key": _key("model"),
    "--optimizer-key": _key("optimizer"),
    "--scaler-key": _key("scaler"),
    "--optimizer": {"choices": tuple(ROWS), "help": "by default known by its keys"},
    "--scaler-format": {
        "choices": tuple(FORMATS),
        "help": "by default known by its keys",
    },
    "--names": {
        "type": Path,
        "metavar": "FILE",
        "help": "the optimizer's parameters in order, one PyTorch name a line",
    },
    "--step": {
        "type": int,
        "metavar": "N",
        "help": "the step count, where the optimizer keeps none; to PyTorch, the "
        "global_step of a Trainer's folder",
    },
    "--accept": {
        "action": "append",
        "default": [],
        "metavar": "SETTING",
        "help": "convert in spite of this difference, and drop the setting: a key of "
        "the optimizer's groups, or one of " + ", ".join(ACCEPTED),
    },
    "--float64": {
        "choices": ("float32", "float64"),
        "help": "what double precision becomes; without it, it is an error. MLX's "
        "files hold no float64: with float64, only what is neither the model's nor "
        "the optimizer's can have it, and is kept for the way back",
    },
    "--like": {
        "type": Path,
        "metavar": "PATH",
        "help": "to PyTorch, for a run that did not come from there: a checkpoint of "
        "the same model, whose names, order and shape are taken, and other entries",
    },
}


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command's arguments.

    Example:
        >>> parser().parse_args(["--torch-path", "a.pt", "--mlx-path", "a"]).dry_run
        False
    """
    made = argparse.ArgumentParser(
        prog="mlx_gradscale.convert",
        epilog="example: mlx_gradscale.convert --torch-path run.pt --mlx-path run",
        description="Convert a training run between PyTorch and MLX: model, optimizer "
        "and GradScaler state. The path that exists is read, the other is written.",
    )
    for title, flags in (
        (None, _PATHS),
        ("names and layouts (patterns are shell patterns on PyTorch names)", _LAYOUTS),
        ("what the checkpoint does not tell", _REST),
    ):
        group = made.add_argument_group(title) if title else made
        for flag, options in flags.items():
            group.add_argument(flag, **options)
    return made
