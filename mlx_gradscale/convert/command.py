"""The ``mlx_gradscale convert`` command, which moves runs between PyTorch and MLX."""

import argparse
import os
import pkgutil
import re
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import mlx.nn as nn
from mlx.optimizers import Optimizer

from ..checkpoint import read_checkpoint, save_checkpoint
from ..commands import EXPECTED, run_command
from ..files.disk import atomic_folder, read_json
from ..files.text import align, printable
from .files import ConvertError, check_folder, check_target, read_source, write_source
from .layouts import AXES
from .origin import ORIGIN, read_origin, write_origin
from .rows import Options, is_adapter
from .run import Plan, fill, load, make_plan, unwrap
from .sections import SECTIONS, show

# Names in the folder of a run, with those of a writer that was killed.
_OWN = re.compile(rf"save-\d+|{re.escape(ORIGIN)}|\.mlx_gradscale-.*")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the ``convert`` command.

    Args:
        argv (list, optional): The arguments of the command. Default: the arguments of
            the process.

    Returns:
        int: The exit code: 0 on success, 1 after an error (printed on one line), 130
        after Ctrl-C, 141 for a closed pipe. Invalid arguments raise ``SystemExit(2)``.
    """
    return run_command(lambda: _convert(parser().parse_args(argv)), EXPECTED)


def parser() -> argparse.ArgumentParser:
    """Return the command's argument parser."""
    made = argparse.ArgumentParser(
        prog="mlx_gradscale convert",
        usage="%(prog)s --torch-path PATH --mlx-path FOLDER [--model MODULE:NAME] ...",
        epilog="example: mlx_gradscale convert --torch-path run.pt --mlx-path run "
        "--model my_model:Net",
        description="Convert a training run between PyTorch and MLX: model, optimizer "
        "and GradScaler state. Reads the path that exists and writes the other; if "
        "both exist, --to chooses the direction.",
    )
    path: dict[str, Any] = {"type": Path, "metavar": "PATH"}
    many: dict[str, Any] = {"action": "append", "default": []}
    pairs = many | {"type": _pair}
    for flag, settings, text in (
        ("torch-path", path | {"required": True}, "PyTorch checkpoint: a .pt or "
         ".safetensors file, or a checkpoint folder of Accelerate or Transformers' "
         "Trainer"),
        ("mlx-path", path | {"required": True}, "MLX checkpoint folder, as written by "
         "save_checkpoint"),
        ("like", path, "on the way back, the PyTorch checkpoint whose values to "
         "replace; default: the one that the run came from"),
        ("names", path, "file that lists the names of the optimizer's parameters, one "
         "per line, in the order of model.named_parameters() in PyTorch"),
        ("model", {"metavar": "MODULE:NAME"}, "the MLX model, which determines names, "
         "layouts and shapes: a Module or a function that returns one, as MODULE:NAME, "
         "or the folder or config.json of an mlx-lm model. MODULE:NAME imports the "
         "module, which runs its code; no other option runs code"),
        ("to", {"choices": ("mlx", "torch")}, "direction of the conversion; required "
         "if both paths exist"),
        ("rename", pairs | {"metavar": "OLD=NEW"}, "rename PyTorch tensors: a regular "
         "expression and, after the last =, its replacement"),
        ("layout", pairs | {"metavar": "PATTERN=LAYOUT"}, "set the layout of the "
         f"PyTorch tensors that match a shell pattern: {', '.join(AXES)}"),
        ("drop", many | {"metavar": "PATTERN"}, "ignore the PyTorch tensors that match "
         "a shell pattern"),
        ("accept", many | {"metavar": "SETTING"}, "ignore an optimizer setting in "
         "which PyTorch and MLX differ; the error about the difference names the "
         "setting"),
        ("overwrite", {"action": "store_true"}, "replace an existing checkpoint"),
        ("dry-run", {"action": "store_true"}, "print the planned conversion without "
         "writing anything"),
    ):  # fmt: skip
        made.add_argument(f"--{flag}", help=text, **settings)
    for name in SECTIONS:
        text = f"key of the {name} in the checkpoint"
        text += "" if name == "model" else "; '' leaves it out"
        made.add_argument(f"--{name}-key", metavar="KEY/KEY", help=text)
    return made


def _pair(text: str) -> tuple[str, str]:
    # Split at the last "=": regular expressions may contain "=", but names do not.
    old, equals, new = text.rpartition("=")
    if not equals:
        raise argparse.ArgumentTypeError(
            f"{text!r} must contain '=' between its two parts."
        )
    return old, new


def _rename(pairs: Sequence[tuple[str, str]], name: str) -> str:
    for old, new in pairs:
        try:
            name = re.sub(old, new, name)
        except (re.error, IndexError) as error:
            raise ConvertError(
                f"--rename {old}={new} is not valid: {error}. OLD must be a regular "
                "expression and NEW a replacement string for re.sub."
            ) from None
    return name


def _options(arguments: argparse.Namespace) -> Options:
    keys = {name: getattr(arguments, f"{name}_key") for name in SECTIONS}
    return Options(
        rename=partial(_rename, arguments.rename) if arguments.rename else str,
        layouts=dict(arguments.layout),
        drop=tuple(arguments.drop),
        keys={name: key for name, key in keys.items() if key is not None},
        names=arguments.names.read_text().split() if arguments.names else None,
        accept=tuple(arguments.accept),
    )


def _convert(arguments: argparse.Namespace) -> None:
    """Convert to the path that does not exist yet, or as ``--to`` says."""
    torch_path, mlx_path = arguments.torch_path, arguments.mlx_path
    sides = {"mlx": torch_path.exists(), "torch": mlx_path.exists()}
    if arguments.to is None and sides["mlx"] == sides["torch"]:
        if sides["mlx"]:
            raise ConvertError(
                f"{torch_path} and {mlx_path} both exist. Pass --to mlx or --to torch."
            )
        raise FileNotFoundError(
            f"Neither {torch_path} nor {mlx_path} exists. Check the paths."
        )
    target = arguments.to or ("mlx" if sides["mlx"] else "torch")
    (_to_mlx if target == "mlx" else _to_torch)(arguments)


def _to_mlx(arguments: argparse.Namespace) -> None:
    original, path = arguments.torch_path, arguments.mlx_path
    check_folder(path, lambda name: bool(_OWN.fullmatch(name)), arguments.overwrite)
    model, options = _model(arguments.model), _options(arguments)
    plan = make_plan(read_source(original), model, options)
    run = load(plan, model)
    _report(run.notes, plan, path, arguments.dry_run)
    if arguments.dry_run:
        return
    step = max((group.step for group in plan.groups), default=0)
    # The step is 0 if it is unknown: PyTorch's SGD does not save a step count.
    extra: dict[str, Any] = {"step": step} if step else {}
    if is_adapter(plan.tensors):
        # The PyTorch checkpoint has no base model, so save only the adapters.
        model.freeze()
        model.unfreeze(keys=["lora_a", "lora_b"])
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_folder(path) as folder:
        # save_checkpoint() needs an optimizer. The base class stands for none.
        save_checkpoint(
            folder, model, run.optimizer or Optimizer(), run.scaler, **extra
        )
        write_origin(folder, path, original, plan, options)
    print(f"Wrote {printable(path)}. The way back needs {printable(original)}.")
    if run.optimizer is None:
        print("There is no optimizer. The weights are in save-*/model.safetensors.")
        return
    module, _, name = arguments.model.partition(":")
    scaler = ", scaler" if run.scaler else ""
    print(
        "To resume:" if name else "To resume, create the model, and then:",
        "from mlx_gradscale import GradScaler, convert, restore_checkpoint",
        *([f"from {module} import {name}", f"model = {name}()"] if name else []),
        f"optimizer = convert.build_optimizer({str(path)!r})",
        *(["scaler = GradScaler()"] if scaler else []),
        f"restore_checkpoint({str(path)!r}, model, optimizer{scaler})",
        sep="\n",
    )


def _to_torch(arguments: argparse.Namespace) -> None:
    folder, path, like = arguments.mlx_path, arguments.torch_path, arguments.like
    model, options, rows = _model(arguments.model), _options(arguments), None
    saved = read_checkpoint(folder)
    if model is None or like is None:
        is_save = folder.name.startswith("save-")  # one of a run's checkpoints
        run = folder.resolve().parent if is_save else folder
        like, rows, options = read_origin(run, options, like)
    print(f"Reading {printable(like)}", file=sys.stderr)
    source = read_source(like)
    check_target(path, source, arguments.overwrite)
    plan = make_plan(source, model, options, rows)
    notes = fill(plan, unwrap(saved), options.accept)
    _report(notes, plan, path, arguments.dry_run)
    if not arguments.dry_run:
        write_source(path, source)
        print(f"Wrote {printable(path)}.")


def _model(place: str | None) -> Any:
    """Return the model that ``--model`` specifies, or None without ``--model``."""
    if place is None:
        return None
    # Append the current folder, so that no file in it shadows an installed module.
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        if Path(place).is_dir() or place.endswith(".json"):
            return _mlx_lm_model(Path(place))
        made: Any = pkgutil.resolve_name(place)
        made = made() if callable(made) and not isinstance(made, nn.Module) else made
        if isinstance(made, nn.Module):
            return made
        problem = f"evaluates to an object of type {type(made).__name__}"
    except ConvertError:
        raise
    except (Exception, SystemExit) as error:  # users' code may raise anything
        problem = f"raised {type(error).__name__}: {error}"
    raise ConvertError(
        f"--model {place} {problem}. Pass an mlx.nn.Module or a function that returns "
        "one, as MODULE:NAME, or the folder or config.json of an mlx-lm model (which "
        "requires mlx-lm)."
    )


def _mlx_lm_model(path: Path) -> nn.Module:
    """Build an mlx-lm model from its ``config.json`` without loading its weights.

    Nothing in the folder is executed: a custom ``model_file`` is refused.
    """
    config = read_json(path / "config.json" if path.is_dir() else path)
    kind = config.get("model_type") if isinstance(config, dict) else None
    problem = ""
    if not isinstance(kind, str) or not re.fullmatch(r"[A-Za-z]\w*([-.]\w+)*", kind):
        problem = "has no valid model_type in its config"
    elif "model_file" in config:
        problem = "needs its own code (model_file), which this command does not run"
    if problem:
        raise ConvertError(f"--model {path} {problem}. Pass the model as MODULE:NAME.")
    from mlx_lm.utils import _get_classes

    model_class, arguments_class = _get_classes(config)
    model: nn.Module = model_class(arguments_class.from_dict(config))
    return model


def _report(notes: Sequence[str], plan: Plan, target: Path, is_dry: bool) -> None:
    """Print the notes, and for ``--dry-run`` the plan."""
    for note in dict.fromkeys(notes):
        print(f"note: {printable(note)}", file=sys.stderr)
    if is_dry:
        table = [("PyTorch", "MLX", "layout")]
        rows = plan.table.rows.items()
        table += [(name, ", ".join(row.mlx), row.layout) for name, row in rows]
        print(f"{printable(target)} would be written (dry run):")
        print(align(table, left=3))
        for group in plan.groups:
            count = len(group.rows)
            print(f"{group.kind} at step {group.step}, parameters: {count}")
        for place in plan.sections["scaler"]:
            print("scaler:", printable(show(place)))
