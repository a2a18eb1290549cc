"""A PyTorch checkpoint as a template for conversion to MLX and back.

``make_template`` finds the sections of a checkpoint and maps them to MLX. A template
is saved without the tensors that MLX holds. ``from_object`` restores it by calling
``make_template`` with the saved names and layouts in place of the model.
"""

import os
import pathlib
import re
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from .. import formats
from ..torch_checkpoint import Limits, TensorShape
from . import optimizers
from .folder import read_torch, trainer_state
from .groups import Group, read_groups
from .layouts import Entry
from .names import Plan, make_plan
from .options import Options
from .order import Order
from .sections import Sections, find_sections
from .tree import (
    CONTAINERS,
    ConvertError,
    Path,
    fingerprint,
    get,
    is_tensor,
    items,
    list_some,
    number,
    show,
    walk,
)

_VERSION = "mlx_gradscale_template"
# File name of the template in the folder of an mlx_gradscale checkpoint.
TEMPLATE = "template.pt"
# Common names for the arguments of a training script.
_SETTINGS = re.compile(r"(\w+_)?(args|cfg|config|hparams|hyper_parameters)")


@dataclass
class Template:
    """A PyTorch checkpoint, and where each array of the MLX run belongs in it.

    ``template["epoch"] = 4`` sets an entry of the checkpoint.

    Attributes:
        checkpoint (Any): The PyTorch object. Tensors that MLX holds are
            ``TensorShape`` leaves.
        files (dict, optional): For a folder, the bytes of the files that are not in
            ``checkpoint``.
    """

    checkpoint: Any
    files: dict[str, mx.array] | None
    options: Options
    sections: Sections
    plan: Plan = field(default_factory=Plan)
    groups: list[Group] = field(default_factory=list)  # of all optimizers
    names: list[str] = field(default_factory=list)  # of the parameters in all groups
    age: dict[str, str] = field(default_factory=dict)  # fingerprints of unused entries
    is_reported: bool = False  # whether stale entries have been reported

    def __getitem__(self, key: Any) -> Any:
        return self.checkpoint[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        self.checkpoint[key] = value

    def tensors(self) -> dict[str, Any]:
        """Return the model's tensors by their PyTorch names."""
        held = get(self.checkpoint, self.sections.model)
        return {name: x for name, x in held.items() if is_tensor(x)}

    def weights(self) -> dict[str, mx.array]:
        """Return the model's weights as MLX arrays, by their MLX names."""
        return self.plan.to_mlx(self.tensors())

    def optimizer_state(self) -> dict[str, mx.array]:
        """Return the flat MLX optimizer state, empty if there is no optimizer."""
        return optimizers.to_mlx(self.groups, self.tensors())

    def scaler_state(self) -> tuple[dict[str, Any] | None, list[str]]:
        """Return the state dict for a ``GradScaler``, or None, and a list of notes."""
        if self.sections.scaler is None:
            return None, []
        held = get(self.checkpoint, self.sections.scaler)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", formats.FormatWarning)
            state = formats.read_state({k: number(x) for k, x in held.items()})
        return state, [str(warning.message) for warning in caught]

    def drop_tensors(
        self, keep: Iterable[str] = (), optimizer_names: Iterable[str] | None = None
    ) -> None:
        """Replace the tensors that MLX holds with their shapes.

        The weights in ``keep``, which MLX rounded, are not replaced. Moments are
        replaced for the parameters in ``optimizer_names``, by default for all.
        """
        held, kept = get(self.checkpoint, self.sections.model), set(keep)
        for name, entry in self.plan.entries.items():
            if isinstance(held[name], mx.array) and not kept & {*entry.mlx}:
                held[name] = TensorShape.of(held[name])
        for alias, name in self.plan.tied.items():
            held[alias] = held[name]
        owned = None if optimizer_names is None else set(optimizer_names)
        for group in self.groups:
            for index, entry in group.entries.items():
                if owned is None or entry.mlx[0] in owned:
                    group.drop_tensors(index)

    def entries_beside(self) -> dict[str, Any]:
        """Return the entries outside the model, optimizers and scaler, by path."""
        model, paths = self.sections.model, self.sections.paths()
        used = {id(get(self.checkpoint, path)) for path in paths}
        # At the top level, the model's tensors are mixed with other entries.
        above: dict[int, Path] = {} if model else {id(self.checkpoint): ()}
        for path in paths:
            for outer in (path[:i] for i in range(len(path))):
                if id(get(self.checkpoint, outer)) not in used:
                    above[id(get(self.checkpoint, outer))] = outer
        return {
            show((*outer, key)): value
            for outer in above.values()
            for key, value in items(get(self.checkpoint, outer))
            if not (id(value) in used or id(value) in above)
            and not (outer == model and is_tensor(value))
        }

    def old_entries(self) -> dict[str, Any]:
        """Return unchanged entries of :meth:`entries_beside` that may count steps."""
        return {
            path: value
            for path, value in self.entries_beside().items()
            if self.age.get(path) == fingerprint(value)
            and not _SETTINGS.fullmatch(path.rpartition("/")[2])
            and not all(
                isinstance(x, (str, bool, type(None), *CONTAINERS))
                for _, x in walk(value, 100, leaves=True)
            )
        }


def make_template(
    checkpoint: Any,
    model: nn.Module | Plan | None,
    options: Options,
    files: dict[str, mx.array] | None = None,
) -> tuple[Template, list[str]]:
    """Make a template that maps a checkpoint to MLX; return it and a list of notes."""
    if is_template(checkpoint):
        raise ConvertError(
            "This file is a template. Pass the original PyTorch checkpoint."
        )
    found = find_sections(checkpoint, options.keys)
    if model is None:
        raise ConvertError(
            "The MLX model, which determines names, layouts and shapes, is missing. "
            "Pass it (--model)."
        )
    template = Template(checkpoint, files, options, found)
    tensors = template.tensors()
    if isinstance(model, Plan):
        template.plan = model
    else:
        arrays = {n: x for n, x in tensors.items() if isinstance(x, mx.array)}
        template.plan = make_plan(arrays, model, options)
    notes = found.notes + template.plan.notes
    for path in found.optimizers:
        template.groups += read_groups(get(checkpoint, path), options.optimizer)
    if template.groups:
        # A safetensors file does not preserve PyTorch's order of tensors.
        file = str(found.model[0]) if files is not None else ""
        is_ordered = not file.endswith(".safetensors")
        order = Order(template.groups, tensors, template.plan)
        template.names, doubts = order.find(options, model, is_ordered)
        notes += optimizers.plan_groups(
            template.groups,
            template.names,
            template.plan.entries,
            options.accept,
            trainer_state(checkpoint).get("global_step"),
        )
        notes += doubts
    notes += template.scaler_state()[1]
    beside = template.entries_beside()
    template.age = {path: fingerprint(x) for path, x in beside.items()}
    schedules = [
        path
        for path, value in beside.items()
        for state in (value if isinstance(value, (list, tuple)) else [value])
        if isinstance(state, dict) and "last_epoch" in state
    ]
    if schedules:
        notes.append(
            f"The PyTorch schedule in {list_some(schedules)} is not converted. Pass an "
            "MLX schedule as learning_rate= to load_torch() or build_optimizer()."
        )
    return template, notes


def to_object(template: Template) -> dict[str, Any]:
    """Return a template as an object for ``torch_checkpoint.save``."""
    options, plan = template.options, template.plan
    return {
        _VERSION: 1,
        "checkpoint": template.checkpoint,
        "files": template.files,
        "entries": {e.torch: (e.layout, e.mlx) for e in plan.entries.values()},
        "tied": plan.tied,
        "keys": dict(options.keys),
        "names": template.names,
        "optimizer": options.optimizer,
        "accept": [*options.accept],
    }


def is_template(value: Any) -> bool:
    """Return whether an object is the result of :func:`to_object`."""
    return isinstance(value, dict) and _VERSION in value


def from_object(value: Mapping[str, Any]) -> Template:
    """Restore a template from the result of :func:`to_object`."""
    try:
        plan = Plan()
        for name, (layout, mlx_names) in value["entries"].items():
            plan.entries[name] = Entry(name, tuple(map(str, mlx_names)), layout)
        for alias, name in value["tied"].items():
            plan.tied[alias] = plan.entries[name].torch
        settings = ("keys", "names", "optimizer", "accept")
        options = Options(**{key: value[key] for key in settings})
        checkpoint, files = value["checkpoint"], value["files"]
        template, _ = make_template(checkpoint, plan, options, files)
        tensors = template.tensors()
        for entry in plan.entries.values():  # raises if a name or a layout is wrong
            entry.mlx_shapes(tuple(tensors[entry.torch].shape))
        if files is not None and not (
            isinstance(checkpoint, dict)
            and all(isinstance(x, mx.array) for x in files.values())
        ):
            raise ConvertError("its files are not bytes")
        return template
    except Exception as error:  # damage may raise anything
        raise ConvertError(
            f"The template is damaged ({type(error).__name__}: {str(error)[:80]}). "
            "Convert the PyTorch checkpoint again, or pass it as like=... (--like)."
        ) from error


def build_optimizer(
    like: Template | str | os.PathLike[str],
    learning_rate: Any = None,
    limits: Limits | None = None,
) -> Any:
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
        path = pathlib.Path(like)
        path = path / TEMPLATE if path.is_dir() else path
        found, _, _ = read_torch(path, limits)
        if not is_template(found):
            raise ConvertError(
                f"{path} is not a template. Pass a folder that mlx_gradscale convert "
                "wrote, or its template.pt."
            )
        like = from_object(found)
    if not like.groups:
        raise ConvertError(
            "The template has no optimizer to build. Create one with mlx.optimizers."
        )
    return optimizers.build(like.groups, learning_rate)
