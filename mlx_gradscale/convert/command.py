"""The command ``mlx_gradscale.convert``: checkpoints between PyTorch and MLX."""

import argparse
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..layouts import Choices
from ..torch_optimizers import number
from .arguments import ACCEPTED, parser
from .flat_optimizer import unflattened
from .folder import read_run, run_files, write_run
from .import_here import import_here
from .mlx_lm_model import mlx_lm_model
from .parts import find_parts, get
from .passed import PATTERN, leaves
from .place import check_folder, contains
from .resume import current_groups
from .several import from_several, is_several
from .swap import refuse_hidden
from .text import dtype, evaluate, printable, shape, table
from .torch_folder import read_rest, read_torch, torch_files, write_torch
from .trainer_state import move_trainer
from .whole import Options, Run, from_torch, plan_of, to_torch

# RuntimeError is what MLX raises where a file cannot be read or written.
_EXPECTED = (ValueError, TypeError, KeyError, OSError, ImportError, RuntimeError)
_INTERRUPTED = 130  # what a shell gives a command that Ctrl-C ended
# Functions name their arguments in errors; the command has flags for them.
_FLAGS = (
    ("float64=mx.float32", "--float64 float32"),
    ("float64=mx.float64", "--float64 float64"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command.

    Args:
        argv: the arguments; by default those of the process.

    Returns:
        int: 0, 1 after an error, 130 after Ctrl-C, both told in one line. Wrong
        usage exits with 2.
    """
    arguments = parser().parse_args(argv)
    try:
        convert(arguments)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return _INTERRUPTED
    except _EXPECTED as error:
        text = " ".join(str(error).split()) or type(error).__name__
        for argument, flag in _FLAGS:
            text = text.replace(argument, flag)
        print(f"error: {printable(text)}", file=sys.stderr)
        return 1
    return 0


def convert(arguments: argparse.Namespace) -> None:
    """What the command does, with errors raised."""
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
    """Which way, by the path that exists."""
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
        return arguments.to
    if not any(there.values()):
        raise FileNotFoundError(
            "Neither path exists: there is nothing to read at --torch-path "
            f"{arguments.torch_path} or --mlx-path {arguments.mlx_path}."
        )
    if all(there.values()):
        raise ValueError("Both paths exist: say which way with --to mlx or --to torch.")
    return "mlx" if there["mlx"] else "torch"


def to_mlx_folder(arguments: argparse.Namespace) -> None:
    check_folder(arguments.mlx_path, arguments.overwrite)
    options, models = _options(arguments), _models(arguments.model)
    checkpoint, notes = read_torch(arguments.torch_path, _float64(arguments))
    if is_several(options):
        run = from_several(checkpoint, models, options)
    else:
        _check_accepted(arguments.accept, _groups_in(checkpoint, options))
        run = from_torch(checkpoint, _only(models), options)
    run.record["folder"] = arguments.torch_path.is_dir()
    rest, left = read_rest(arguments.torch_path, checkpoint)
    run.record |= rest
    _say(notes + left + run.notes)
    written = [arguments.mlx_path / name for name in run_files(run)]
    if arguments.dry_run:
        print(_plan(run, arguments.torch_path, arguments.mlx_path, written))
        return
    write_run(arguments.mlx_path, run, arguments.overwrite, evaluate)
    print(f"Wrote {printable(arguments.mlx_path)}.")


def to_torch_file(arguments: argparse.Namespace) -> None:
    run = read_run(arguments.mlx_path)
    if arguments.like is not None and run.runs:
        raise ValueError(f"--like is for one run: {arguments.mlx_path} holds several.")
    if arguments.like is not None:
        used = run.record.get("used")
        run.record = {**_record_like(arguments), "used": used, PATTERN: True}
    _check_accepted(arguments.accept, _recorded_groups(run.record))
    moved = move_trainer(run, arguments.step)
    checkpoint, notes = to_torch(run, arguments.accept)
    _say(moved + notes)
    is_folder = run.record.get("folder", False)
    place = (arguments.torch_path, checkpoint, is_folder, arguments.overwrite)
    files = torch_files(*place, run.record)
    if arguments.dry_run:
        if run.optimizer is not None and "optimizer" in run.record:
            run.record["optimizer"]["groups"] = current_groups(run)
        written = [arguments.torch_path]
        if is_folder:
            written = [arguments.torch_path / name for name in files]
        print(_plan(run, arguments.mlx_path, arguments.torch_path, written))
        return
    evaluate(_arrays(checkpoint))
    write_torch(*place, run.record)
    print(f"Wrote {printable(arguments.torch_path)}.")


def _groups_in(checkpoint: Any, options: Options) -> Sequence[Mapping[str, Any]]:
    parts = find_parts(checkpoint, options.keys)
    if "optimizer" not in parts:
        return ()
    return unflattened(get(checkpoint, parts["optimizer"]))["param_groups"]


def _recorded_groups(record: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    optimizer = record.get("optimizer")
    return optimizer.get("groups", ()) if isinstance(optimizer, Mapping) else ()


def _check_accepted(accept: Sequence[str], groups: Sequence[Mapping[str, Any]]) -> None:
    keys = {str(key) for group in groups for key in group} - {"params", "param_names"}
    known = sorted({*ACCEPTED, *keys})
    for word in accept:
        if word not in known:
            raise ValueError(
                f"--accept {word}: there is no such setting; known are "
                f"{', '.join(known)}."
            )


def _record_like(arguments: argparse.Namespace) -> dict[str, Any]:
    checkpoint, _ = read_torch(arguments.like, _float64(arguments))
    options = _options(arguments)
    # The pattern's own momentum is not used, so it may be missing.
    accept = (*options.accept, "dampening")
    options = Options(**{**vars(options), "accept": accept})
    run = from_torch(checkpoint, _only(_models(arguments.model)), options)
    run.record["folder"] = arguments.like.is_dir()
    return run.record | read_rest(arguments.like, checkpoint)[0]


def _options(arguments: argparse.Namespace) -> Options:
    renames = [_rename(text) for text in arguments.rename]
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


def _only(models: list[nn.Module]) -> nn.Module | None:
    if len(models) > 1:
        raise ValueError("--model gives several: name them with --model-key, too.")
    return models[0] if models else None


def _model(place: str) -> nn.Module:
    """The user's MLX model, from MODULE:NAME or mlx-lm's config."""
    if Path(place).is_dir() or place.endswith(".json"):
        return mlx_lm_model(Path(place))
    module, colon, name = place.partition(":")
    if not colon:
        raise ValueError(
            f"--model {place}: give it as MODULE:NAME, or an mlx-lm model's folder."
        )
    holder = _users(place, lambda: import_here(module))
    if not hasattr(holder, name):
        raise ValueError(f"--model {place}: {module} has no {name}.")
    made = getattr(holder, name)
    if not isinstance(made, nn.Module):
        made = _users(place, made)
    if not isinstance(made, nn.Module):
        raise ValueError(f"--model {place} gives no mlx.nn.Module.")
    return made


def _users(place: str, code: Callable[[], Any]) -> Any:
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
            prefix = "" if record["joined"] else f"states.{i}."
            step = run.optimizer[f"{prefix}step"].item()
            count = len(record["names"][i])
            rows.append((i, record["name"], count, number(group["lr"]), step))
        header = ("group", "optimizer", "parameters", "learning rate", "step")
        one = "one optimizer" if record["joined"] else "a MultiOptimizer"
        lines += ["", table(header, rows), f"as {one}"]
    if run.scaler is not None:
        rows = run.scaler.items()
        lines += ["", table(("scaler", ""), rows)]
    rows = [(path, "replaced" if path.exists() else "new") for path in written]
    lines += ["", table(("file", ""), rows)] if rows else []
    return "\n".join(lines)
