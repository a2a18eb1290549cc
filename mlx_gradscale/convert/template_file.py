"""Keep a template in the folder of an MLX run, without the tensors that MLX holds."""

import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.nn as nn
from mlx.optimizers import Optimizer

from ..files.paths import check_name
from . import old_checkpoint as torch_checkpoint
from . import optimizers
from .folder import read_torch
from .layouts import Entry
from .old_checkpoint import Limits
from .options import Options
from .sections import find_sections
from .template import Template, make_template
from .tree import ConvertError

# The file in the folder of a run, and the folder for other files of a PyTorch folder.
TEMPLATE, FILES = "template.pt", "template_files"
_VERSION = "mlx_gradscale_template"


def write_template(folder: Path, template: Template) -> None:
    """Write a template to the folder of a run."""
    torch_checkpoint.save(folder / TEMPLATE, to_object(template))
    for name, source in (template.files or {}).items():
        (folder / FILES).mkdir(exist_ok=True)
        shutil.copyfile(source, folder / FILES / name)


def to_object(template: Template) -> dict[str, Any]:
    """Return a template as an object for ``torch_checkpoint.save``."""
    options, plan, files = template.options, template.plan, template.files
    return {
        _VERSION: 1,
        "checkpoint": template.checkpoint,
        "files": None if files is None else [*files],
        "entries": {e.torch: (e.layout, e.mlx) for e in plan.entries.values()},
        "tied": plan.tied,
        "keys": dict(options.keys),
        "names": template.names,
        "optimizer": options.optimizer,
    }


def from_object(value: dict[str, Any], folder: Path) -> Template:
    """Restore a template from the result of :func:`to_object`, in a run's folder."""
    try:
        checkpoint, files = value["checkpoint"], value["files"]
        if files is not None:
            files = {check_name(n, "It"): folder / FILES / n for n in files}
            missing = [str(path) for path in files.values() if not path.is_file()]
            if missing or not isinstance(checkpoint, dict):
                raise ConvertError(f"{missing[:1] or 'its folder'} is missing")
        options = Options(keys=value["keys"], optimizer=value["optimizer"])
        sections = find_sections(checkpoint, options.keys)
        template = Template(checkpoint, files, options, sections)
        entries, tensors = template.plan.entries, template.tensors()
        for name, (layout, mlx_names) in value["entries"].items():
            entries[name] = Entry(name, tuple(map(str, mlx_names)), layout)
            # This raises if the name or the layout is wrong.
            entries[name].mlx_shapes(tuple(tensors[name].shape))
        for alias, name in value["tied"].items():
            template.plan.tied[alias] = entries[name].torch
        if template.groups:
            template.assign(template.order().match(value["names"]))
        return template
    except Exception as error:  # damage may raise anything
        raise ConvertError(
            f"The template is damaged ({type(error).__name__}: {str(error)[:80]}). "
            "Convert the PyTorch checkpoint again, or pass it as like=... (--like)."
        ) from error


def is_template(value: Any) -> bool:
    """Return whether an object is the result of :func:`to_object`."""
    return isinstance(value, dict) and _VERSION in value


def read_template(
    like: Template | str | os.PathLike[str], model: nn.Module | None, options: Options
) -> Template:
    """Return ``like`` as a template; if it is a path, read the file or folder."""
    if not isinstance(like, Template):
        checkpoint, files, _ = read_torch(like, options.limits)
        if not is_template(checkpoint):
            return make_template(checkpoint, model, options, files)[0]
        like = from_object(checkpoint, Path(like).parent)
    if replace(options, accept=(), limits=None) != Options():
        raise ConvertError(
            "A template already determines all options except accept (--accept) and "
            "limits (--limit). Omit the others, or pass the PyTorch checkpoint itself "
            "as like=... (--like)."
        )
    return like


def build_optimizer(
    like: Template | str | os.PathLike[str],
    learning_rate: Any = None,
    limits: Limits | None = None,
) -> Optimizer:
    """Return the MLX optimizer equivalent to a checkpoint's optimizer.

    Args:
        like (Template or str): A template, a folder that ``mlx_gradscale convert``
            wrote, or its ``template.pt``.
        learning_rate (float, Callable or list, optional): As for
            :func:`~mlx_gradscale.convert.load_torch`.
        limits (Limits, optional): Limits on memory and work.

    Returns:
        Optimizer: The optimizer, without its state. To restore the state, call
        ``restore_checkpoint``.
    """
    if not isinstance(like, Template):
        path = Path(like)
        path = path / TEMPLATE if path.is_dir() else path
        like = read_template(path, None, Options(limits=limits))
    if not like.groups:
        raise ConvertError(
            "The template has no optimizer to build. Create one with mlx.optimizers."
        )
    return optimizers.build(like.groups, learning_rate)
