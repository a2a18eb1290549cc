"""The command ``mlx_gradscale.convert``: checkpoints between PyTorch and MLX."""

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..commands import run_command
from ..files.folders import check_folder, refuse_hidden
from ..files.paths import contains
from ..files.text import dtype_name, printable, shape, table
from ..run_folder.contents import write_files
from .arguments import parser
from .conversion import from_torch, to_torch
from .folder import read_run, run_files
from .import_here import import_here
from .layouts import Choices
from .mlx_lm_model import mlx_lm_model
from .optimizers import number
from .passthrough import leaves
from .progress import evaluate
from .record import Record
from .resume import current_groups
from .run import Options, Run
from .several import from_several, is_several
from .torch_folder import read_rest, read_torch, torch_files, write_torch_files
from .trainer_state import move_trainer

# RuntimeError is what MLX raises where a file cannot be read or written.
_EXPECTED = (ValueError, TypeError, KeyError, OSError, ImportError, RuntimeError)
_FLAGS = {
    "float64=mx.float32": "--float64 float32",
    "float64=mx.float64": "--float64 float64",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        argv (list, optional): The arguments. Default: those of the process.

    Returns:
        int: 0, 1 after an error, 130 after Ctrl-C, both said in one line. Wrong
        usage exits with 2.
    """
    return run_command(
        lambda: convert(parser().parse_args(argv)), _EXPECTED, flags=_FLAGS
    )


def convert(arguments: argparse.Namespace) -> None:
    """Do what the command does, with errors raised."""
    way = direction(arguments)
    if contains(arguments.mlx_path, arguments.torch_path) or contains(
        arguments.torch_path, arguments.mlx_path
    ):
        raise ValueError(
            f"--torch-path {arguments.torch_path} and --mlx-path {arguments.mlx_path} "
            "are the same, or one lies in the other: give two places apart."
        )
    if way == "mlx":
        to_mlx_folder(arguments)
    else:
        to_torch_file(arguments)


def direction(arguments: argparse.Namespace) -> str:
    """Return which way to go, by the path that exists."""
    paths = {"mlx": arguments.torch_path, "torch": arguments.mlx_path}
    for path in paths.values():
        refuse_hidden(path)
    there = {way: path.exists() for way, path in paths.items()}
    if arguments.to is not None:
        if not there[arguments.to]:
            source = "torch" if arguments.to == "mlx" else "mlx"
            raise FileNotFoundError(
                f"There is nothing at --{source}-path {paths[arguments.to]} to read."
            )
        return str(arguments.to)
    if not any(there.values()):
        raise FileNotFoundError(
            "Neither path exists: there is nothing to read at --torch-path "
            f"{arguments.torch_path} or --mlx-path {arguments.mlx_path}."
        )
    if all(there.values()):
        raise ValueError("Both paths exist: say which way with --to mlx or --to torch.")
    return "mlx" if there["mlx"] else "torch"


def to_mlx_folder(arguments: argparse.Namespace) -> None:
    """Write the folder of a PyTorch checkpoint, or print what would be written."""
    check_folder(arguments.mlx_path, arguments.overwrite)
    options, models = _options(arguments), _models(arguments.model)
    checkpoint, notes = read_torch(arguments.torch_path, _float64(arguments))
    if is_several(options):
        run = from_several(checkpoint, models, options)
    else:
        run = from_torch(checkpoint, _one_model(models), options)
    left = read_rest(arguments.torch_path, checkpoint, run.record)
    _say(notes + left + run.notes)
    files = run_files(run)
    if arguments.dry_run:
        written = [arguments.mlx_path / name for name in files]
        print(_plan(run, arguments.torch_path, arguments.mlx_path, written))
        return
    write_files(arguments.mlx_path, files, arguments.overwrite, evaluate)
    print(f"Wrote {printable(arguments.mlx_path)}.")


def to_torch_file(arguments: argparse.Namespace) -> None:
    """Write the PyTorch checkpoint of a folder, or print what would be written."""
    run = read_run(arguments.mlx_path)
    if arguments.like is not None and run.runs:
        raise ValueError(f"--like is for one run: {arguments.mlx_path} holds several.")
    if arguments.like is not None:
        like = _record_like(arguments)
        run.record = replace(like, used=run.record.used, is_pattern=True)
    moved = move_trainer(run, arguments.step)
    checkpoint, notes = to_torch(run, arguments.accept)
    _say(moved + notes)
    is_folder, overwrite = run.record.is_folder, arguments.overwrite
    place = (arguments.torch_path, checkpoint, is_folder, overwrite)
    files = torch_files(*place, run.record)
    if arguments.dry_run:
        if run.optimizer is not None and run.record.optimizer:
            run.record.optimizer.groups = current_groups(run)
        written = [arguments.torch_path]
        if is_folder:
            written = [arguments.torch_path / name for name in files]
        print(_plan(run, arguments.mlx_path, arguments.torch_path, written))
        return
    evaluate(_arrays(checkpoint))
    write_torch_files(arguments.torch_path, files, is_folder, overwrite)
    print(f"Wrote {printable(arguments.torch_path)}.")


def _record_like(arguments: argparse.Namespace) -> Record:
    checkpoint, _ = read_torch(arguments.like, _float64(arguments))
    options = _options(arguments)
    # The pattern's own momentum is not used, so it may be missing.
    accept = (*options.accept, "dampening")
    options = replace(options, accept=accept)
    record = from_torch(
        checkpoint, _one_model(_models(arguments.model)), options
    ).record
    read_rest(arguments.like, checkpoint, record)
    return record


def _options(arguments: argparse.Namespace) -> Options:
    renames = [_rename(text) for text in arguments.rename]
    keys = {
        section: getattr(arguments, f"{section}_key")
        for section in ("model", "optimizer", "scaler")
        if getattr(arguments, f"{section}_key") is not None
    }
    names = arguments.names.read_text().split() if arguments.names else None
    return Options(
        Choices(
            rename=renames or None,
            conv=tuple(arguments.conv),
            conv_transpose=tuple(arguments.conv_transpose),
            split_qkv=tuple(arguments.split_qkv),
            transpose=tuple(arguments.transpose),
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


def _rename(text: str) -> tuple[str, str]:
    # The last one: a pattern may hold "=", as in (?=...), and no name does.
    old, equals, new = text.rpartition("=")
    if not equals:
        raise ValueError(f"--rename {text}: give it as OLD=NEW.")
    try:
        re.compile(old).sub(new, "")  # the replacement is checked without a match too
    except (re.error, IndexError) as error:
        raise ValueError(
            f"--rename {text}: {error}. OLD is a regular expression, NEW what "
            "re.sub puts in its place."
        ) from None
    return old, new


def _models(places: str | None) -> list[nn.Module]:
    return [_model(place) for place in places.split(",")] if places else []


def _one_model(models: list[nn.Module]) -> nn.Module | None:
    if len(models) > 1:
        raise ValueError("--model gives several: name them with --model-key, too.")
    return models[0] if models else None


def _model(place: str) -> nn.Module:
    """Return the user's MLX model, from MODULE:NAME or mlx-lm's config."""
    if Path(place).is_dir() or place.endswith(".json"):
        return mlx_lm_model(Path(place))
    module, colon, name = place.partition(":")
    if not colon:
        raise ValueError(
            f"--model {place}: give it as MODULE:NAME, or an mlx-lm model's folder."
        )
    holder = _run_users_code(place, lambda: import_here(module))
    if not hasattr(holder, name):
        raise ValueError(f"--model {place}: {module} has no {name}.")
    made = getattr(holder, name)
    if not isinstance(made, nn.Module):
        made = _run_users_code(place, made)
    if not isinstance(made, nn.Module):
        raise ValueError(f"--model {place} gives no mlx.nn.Module.")
    return made


def _run_users_code(place: str, code: Callable[[], Any]) -> Any:
    try:
        return code()
    except (Exception, SystemExit) as error:  # it may raise anything
        kind = type(error).__name__
        said = f"{kind}: {error}" if str(error) else kind
        raise ValueError(f"--model {place} raised {said}") from error


def _float64(arguments: argparse.Namespace) -> mx.Dtype | None:
    return getattr(mx, arguments.float64) if arguments.float64 else None


def _arrays(checkpoint: Any) -> dict[str, mx.array]:
    found = enumerate(leaves(checkpoint))
    return {str(i): leaf for i, leaf in found if isinstance(leaf, mx.array)}


def _say(notes: Sequence[str]) -> None:
    for note in notes:
        print(f"[WARNING] {printable(note)}", file=sys.stderr)


def _plan(run: Run, source: Path, target: Path, written: Sequence[Path]) -> str:
    lines = [printable(f"{source} -> {target}")]
    for name, each in run.runs.items():
        lines += ["", _plan(each, Path(name), target / name, ())]
    if run.weights is not None and run.record.model:
        plan = run.record.model.plan
        rows: list[Any] = []
        for name, entry in plan.entries.items():
            array = run.weights[entry.mlx[0]]
            arrows = ", ".join(entry.mlx)
            rows.append((name, arrows, shape(array), dtype_name(array), entry.layout))
        rows += [(a, f"(tied to {n})", "", "", "") for a, n in plan.tied.items()]
        rows += [(name, "(training.json)", "", "", "") for name in plan.unplaced]
        header = ("PyTorch", "MLX", "MLX shape", "dtype", "layout")
        lines += ["", table(header, rows)]
    if run.optimizer is not None and run.record.optimizer:
        record = run.record.optimizer
        rows = []
        for i, group in enumerate(record.groups):
            step = run.optimizer[f"{record.prefix(i)}step"].item()
            count = len(record.names[i])
            rows.append((i, record.name, count, number(group["lr"]), step))
        header = ("group", "optimizer", "parameters", "learning rate", "step")
        one = "one optimizer" if record.joined else "a MultiOptimizer"
        lines += ["", table(header, rows), f"as {one}"]
    if run.scaler is not None:
        lines += ["", table(("scaler", ""), run.scaler.items())]
    files = [(path, "replaced" if path.exists() else "new") for path in written]
    lines += ["", table(("file", ""), files)] if files else []
    return "\n".join(lines)
