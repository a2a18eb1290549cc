"""The command ``mlx_gradscale.convert``: checkpoints between PyTorch and MLX."""

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from ..layouts import Choices
from ..torch_optimizers import number
from .arguments import parser
from .folder import read_run, read_torch, write_run, write_torch
from .text import dtype, evaluate, shape, table
from .whole import Options, Run, from_torch, plan_of, to_torch

# RuntimeError is what MLX raises where a file cannot be read or written.
_EXPECTED = (ValueError, TypeError, KeyError, OSError, ImportError, RuntimeError)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command.

    Args:
        argv: the arguments; by default those of the process.

    Returns:
        int: 0, or 1 after an error, which is printed in one line. Wrong usage
        exits with 2.
    """
    arguments = parser().parse_args(argv)
    try:
        convert(arguments)
    except _EXPECTED as error:
        text = " ".join(str(error).split()) or type(error).__name__
        print(f"error: {text}", file=sys.stderr)
        return 1
    return 0


def convert(arguments: argparse.Namespace) -> None:
    """What the command does, with errors raised."""
    if direction(arguments) == "mlx":
        to_mlx_folder(arguments)
    else:
        to_torch_file(arguments)


def direction(arguments: argparse.Namespace) -> str:
    """Which way, by the path that exists."""
    there = {
        "torch": arguments.mlx_path.exists(),
        "mlx": arguments.torch_path.exists(),
    }
    if arguments.to is not None:
        if not there[arguments.to]:
            source = "torch" if arguments.to == "mlx" else "mlx"
            raise FileNotFoundError(f"There is nothing at --{source}-path to read.")
        return arguments.to
    if there["mlx"] == there["torch"]:
        both = "Both paths exist" if there["mlx"] else "Neither path exists"
        raise ValueError(f"{both}: say which way with --to mlx or --to torch.")
    return "mlx" if there["mlx"] else "torch"


def to_mlx_folder(arguments: argparse.Namespace) -> None:
    checkpoint, notes = read_torch(arguments.torch_path, _float64(arguments))
    run = from_torch(checkpoint, _model(arguments.model), _options(arguments))
    run.record["folder"] = arguments.torch_path.is_dir()
    _say(notes + run.notes)
    if arguments.dry_run:
        print(_plan(run, arguments.torch_path, arguments.mlx_path))
        return
    write_run(arguments.mlx_path, run, arguments.overwrite, evaluate)
    print(f"Wrote {arguments.mlx_path}.")


def to_torch_file(arguments: argparse.Namespace) -> None:
    run = read_run(arguments.mlx_path)
    if arguments.like is not None:
        run.record = {**_record_like(arguments), "used": run.record.get("used")}
    checkpoint, notes = to_torch(run, arguments.accept)
    _say(notes)
    if arguments.dry_run:
        print(_plan(run, arguments.mlx_path, arguments.torch_path))
        return
    evaluate(_arrays(checkpoint))
    write_torch(
        arguments.torch_path,
        checkpoint,
        bool(run.record.get("folder")),
        arguments.overwrite,
    )
    print(f"Wrote {arguments.torch_path}.")


def _record_like(arguments: argparse.Namespace) -> dict[str, Any]:
    checkpoint, _ = read_torch(arguments.like, _float64(arguments))
    options = _options(arguments)
    # The pattern's own momentum is not used, so it may be missing.
    accept = (*options.accept, "dampening")
    options = Options(**{**vars(options), "accept": accept})
    run = from_torch(checkpoint, _model(arguments.model), options)
    run.record["folder"] = arguments.like.is_dir()
    return run.record


def _options(arguments: argparse.Namespace) -> Options:
    renames = []
    for text in arguments.rename:
        old, equals, new = text.partition("=")
        if not equals:
            raise ValueError(f"--rename {text}: give it as OLD=NEW.")
        renames.append((old, new))
    keys = {
        part: getattr(arguments, f"{part}_key")
        for part in ("model", "optimizer", "scaler")
        if getattr(arguments, f"{part}_key") is not None
    }
    names = arguments.names.read_text().split() if arguments.names else None
    return Options(
        Choices(
            rename=renames or None,
            conv=tuple(arguments.conv),
            conv_transpose=tuple(arguments.conv_transpose),
            split_qkv=tuple(arguments.split_qkv),
            keep=tuple(arguments.keep_layout),
            drop=tuple(arguments.drop),
        ),
        keys,
        arguments.optimizer,
        tuple(arguments.accept),
        tuple(names) if names is not None else None,
        arguments.step,
        arguments.scaler_format,
    )


def _model(place: str | None) -> nn.Module | None:
    """The user's MLX model, from MODULE:NAME."""
    if place is None:
        return None
    module, colon, name = place.partition(":")
    if not colon:
        raise ValueError(f"--model {place}: give it as MODULE:NAME.")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        made = getattr(importlib.import_module(module), name)
    except AttributeError:
        raise ValueError(f"--model {place}: {module} has no {name}.") from None
    made = made if isinstance(made, nn.Module) else made()
    if not isinstance(made, nn.Module):
        raise ValueError(f"--model {place} gives no mlx.nn.Module.")
    return made


def _float64(arguments: argparse.Namespace) -> mx.Dtype | None:
    return getattr(mx, arguments.float64) if arguments.float64 else None


def _arrays(checkpoint: Any) -> dict[str, mx.array]:
    leaves = tree_flatten(checkpoint)
    return {name: leaf for name, leaf in leaves if isinstance(leaf, mx.array)}


def _say(notes: Sequence[str]) -> None:
    for note in notes:
        print(f"[WARNING] {note}", file=sys.stderr)


def _plan(run: Run, source: Path, target: Path) -> str:
    lines = [f"{source} -> {target}"]
    if run.weights is not None and "model" in run.record:
        plan = plan_of(run.record)
        rows = []
        for name, entry in plan.entries.items():
            array = run.weights[entry.mlx[0]]
            arrows = ", ".join(entry.mlx)
            rows.append((name, arrows, shape(array), dtype(array), entry.layout))
        rows += [(a, f"(tied to {n})", "", "", "") for a, n in plan.tied.items()]
        rows += [(name, "(training.json)", "", "", "") for name in plan.aside]
        header = ("PyTorch", "MLX", "MLX shape", "dtype", "layout")
        lines += ["", table(header, rows)]
    if run.optimizer is not None and "optimizer" in run.record:
        record = run.record["optimizer"]
        rows = []
        for i, group in enumerate(record["groups"]):
            count, step = len(record["names"][i]), record["steps"][i]
            rows.append((i, record["name"], count, number(group["lr"]), step))
        header = ("group", "optimizer", "parameters", "learning rate", "step")
        one = "one optimizer" if record["joined"] else "a MultiOptimizer"
        lines += ["", table(header, rows), f"as {one}"]
    if run.scaler is not None:
        rows = run.scaler.items()
        lines += ["", table(("scaler", ""), rows)]
    return "\n".join(lines)
