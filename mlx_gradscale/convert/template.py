"""A PyTorch checkpoint as a template for conversion to MLX and back.

``make_template`` finds the sections of a checkpoint and maps them to MLX. A template
can be saved without the tensors that MLX holds.
"""

import os
import pathlib
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from .. import formats, torch_checkpoint
from ..torch_checkpoint import TensorShape
from . import optimizers
from .groups import MOST_STEPS, Group, read_groups
from .layouts import AXES, FUSED, Entry
from .names import Plan, make_plan
from .options import Options
from .order import Order
from .sections import find_sections, fingerprint
from .tree import (
    ConvertError,
    Path,
    get,
    is_tensor,
    key_of,
    list_some,
    number,
    show,
    walk,
)

_VERSION = "mlx_gradscale_template"
# File name of the template in the folder of an mlx_gradscale checkpoint.
TEMPLATE = "template.pt"


@dataclass
class Template:
    """A PyTorch checkpoint and the locations of MLX's arrays in it.

    ``template["epoch"] = 4`` sets an entry of the checkpoint.

    Attributes:
        checkpoint (Any): The PyTorch object. Tensors that MLX holds are
            ``TensorShape`` leaves.
        files (dict, optional): For a folder, the bytes of the files that are not in
            ``checkpoint``.
        model (tuple): The path of the model's state dict.
        optimizers (list): The paths of its optimizers' state dicts.
        scaler (tuple, optional): The path of the scaler's state.
        scaler_format (str, optional): A key of ``mlx_gradscale.formats.FORMATS``.
        plan (Plan): Mapping of the model's tensors to MLX.
        groups (list): The parameter groups of all optimizers.
        age (dict): Fingerprints of the entries that MLX does not use, taken when they
            were read.
        is_reported (bool): Whether stale entries have been reported.
    """

    checkpoint: Any
    files: dict[str, mx.array] | None
    model: Path
    optimizers: list[Path]
    scaler: Path | None
    scaler_format: str | None = None
    plan: Plan = field(default_factory=Plan)
    groups: list[Group] = field(default_factory=list)
    age: dict[str, str] = field(default_factory=dict)
    is_reported: bool = False

    def __getitem__(self, key: Any) -> Any:
        return self.checkpoint[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        self.checkpoint[key] = value

    def tensors(self) -> dict[str, Any]:
        """Return the model's tensors by their PyTorch names."""
        held = get(self.checkpoint, self.model)
        return {name: x for name, x in held.items() if is_tensor(x)}

    def weights(self) -> dict[str, mx.array]:
        """Return the MLX weights."""
        return self.plan.to_mlx(self.tensors())

    def optimizer_state(self) -> dict[str, mx.array]:
        """Return the flat MLX optimizer state, empty if there is no optimizer."""
        return optimizers.to_mlx(self.groups, self.tensors())

    def scaler_state(self) -> tuple[dict[str, Any] | None, list[str]]:
        """Return the ``GradScaler.state_dict``, if there is one, and notes."""
        if self.scaler is None:
            return None, []
        held = {k: number(x) for k, x in get(self.checkpoint, self.scaler).items()}
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", formats.FormatWarning)
            state = formats.read_state(held, self.scaler_format)
        return state, [str(warning.message) for warning in caught]

    def drop_tensors(
        self, keep: Iterable[str] = (), optimizer_names: Iterable[str] | None = None
    ) -> None:
        """Replace the tensors that MLX holds with their shapes.

        Args:
            keep (Iterable): MLX names of weights to keep because MLX rounded them.
            optimizer_names (Iterable, optional): MLX names of the parameters whose
                moments MLX holds. Default: all.
        """
        held, kept = get(self.checkpoint, self.model), set(keep)
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
        """Return the entries that MLX does not use, by path."""
        taken = [*self.optimizers, *([] if self.scaler is None else [self.scaler])]
        # At the top level, the model's tensors are mixed with other entries.
        taken += [self.model] if self.model else [(name,) for name in self.tensors()]
        above = {key_of(path[:i]) for path in taken for i in range(len(path))}
        used = above.union(map(key_of, taken))
        return {
            show(path): value
            for path, value in walk(self.checkpoint, max(map(len, taken)), leaves=True)
            if path and key_of(path[:-1]) in above and key_of(path) not in used
        }

    def set_age(self) -> None:
        """Record fingerprints of the other entries, to detect later changes."""
        beside = self.entries_beside()
        self.age = {path: fingerprint(x) for path, x in beside.items()}


def make_template(
    checkpoint: Any,
    model: nn.Module | None,
    options: Options,
    files: dict[str, mx.array] | None = None,
) -> tuple[Template, list[str]]:
    """Find the sections of a checkpoint and map them to MLX; also return notes."""
    if is_template(checkpoint):
        raise ConvertError(
            "This file is a template. Pass the PyTorch checkpoint it was made from."
        )
    found = find_sections(checkpoint, options.keys)
    if model is None:
        raise ConvertError(
            "The MLX model is missing. It determines names, layouts and shapes. Pass "
            "--model."
        )
    template = Template(checkpoint, files, found.model, found.optimizers, found.scaler)
    tensors = {n: x for n, x in template.tensors().items() if isinstance(x, mx.array)}
    template.plan = make_plan(tensors, model, options)
    notes = found.notes + template.plan.notes()
    for path in found.optimizers:
        groups = read_groups(get(checkpoint, path))
        optimizers.set_kind(groups, options.optimizer)
        template.groups += groups
    if template.groups:
        # A safetensors file does not preserve PyTorch's order of tensors.
        file = str(found.model[0]) if files is not None else ""
        is_ordered = not file.endswith(".safetensors")
        order = Order(template.groups, tensors, template.plan)
        names, doubts = order.find(options, model, is_ordered)
        entries = template.plan.entries
        notes += optimizers.plan_groups(template.groups, names, entries, options)
        notes += doubts
    if found.scaler is not None:
        state = get(checkpoint, found.scaler)
        template.scaler_format = options.scaler_format or formats.recognize(state)
        notes += template.scaler_state()[1]
    template.set_age()
    schedules = [
        path
        for path, value in template.entries_beside().items()
        for state in (value if isinstance(value, (list, tuple)) else [value])
        if isinstance(state, dict) and "last_epoch" in state
    ]
    if schedules:
        notes.append(
            f"The PyTorch schedule in {list_some(schedules)} is not converted. Pass an "
            "MLX schedule as learning_rate= to load_torch() or build_optimizer()."
        )
    return template, notes


_STORED = ("checkpoint", "files", "model", "optimizers", "scaler", "scaler_format")


def to_object(template: Template) -> dict[str, Any]:
    """Return a template as plain values, for ``torch_checkpoint.save``."""
    return {
        _VERSION: 1,
        **{name: getattr(template, name) for name in _STORED},
        "entries": {e.torch: (e.layout, e.mlx) for e in template.plan.entries.values()},
        "tied": template.plan.tied,
        "groups": [
            (g.kind, g.step, {i: e.torch for i, e in g.entries.items()})
            for g in template.groups
        ],
    }


def is_template(value: Any) -> bool:
    """Return whether an object was made by :func:`to_object`."""
    return isinstance(value, dict) and _VERSION in value


def from_object(value: Mapping[str, Any]) -> Template:
    """Rebuild a template from :func:`to_object`, or raise if it is damaged."""
    try:
        return _parse(value)
    except Exception as error:  # any value may occur anywhere
        raise ConvertError(
            f"The template is damaged ({type(error).__name__}: {str(error)[:80]}). "
            "Pass the original PyTorch checkpoint with like=... (--like)."
        ) from error


def _parse(value: Mapping[str, Any]) -> Template:
    template = Template(*(value[name] for name in _STORED))
    entries, tied = template.plan.entries, template.plan.tied
    for name, (layout, mlx_names) in value["entries"].items():
        entries[name] = Entry(name, tuple(mlx_names), layout)
        _expect(layout in (*AXES, FUSED) and type(name) is str)
        _expect(all(type(n) is str for n in mlx_names))
        _expect(len(mlx_names) == (3 if layout == FUSED else 1))
    tied |= value["tied"]
    _expect(all(owner in entries for owner in tied.values()))
    if template.files is not None:
        _expect(isinstance(template.checkpoint, dict))
        _expect(all(isinstance(x, mx.array) for x in template.files.values()))
    for path in (template.model, template.scaler):
        if path is not None:
            held = get(template.checkpoint, path)
            _expect(type(path) is tuple and isinstance(held, dict))
    _expect(template.tensors().keys() >= {*entries, *tied})
    _expect(template.scaler is None or template.scaler_format in formats.FORMATS)
    for path in template.optimizers:
        template.groups += read_groups(get(template.checkpoint, path))
    for group, stored in zip(template.groups, value["groups"], strict=True):
        group.kind, group.step, names = stored
        group.entries = {index: entries[name] for index, name in names.items()}
        _expect(type(group.step) is int and 0 <= group.step < MOST_STEPS)
        _expect(set(map(str, names)) <= set(map(str, group.settings["params"])))
        group.check_settings()
    template.set_age()
    return template


def _expect(is_right: Any) -> None:
    if not is_right:
        raise ConvertError("its entries are inconsistent")


def build_optimizer(
    like: Template | str | os.PathLike[str], learning_rate: Any = None
) -> Any:
    """Return the MLX optimizer equivalent to a checkpoint's optimizer.

    Args:
        like (Template or str): A template, a folder that ``mlx_gradscale convert``
            wrote, or its ``template.pt``.
        learning_rate (float, Callable or list, optional): As for
            :func:`~mlx_gradscale.convert.load_torch`.

    Returns:
        Optimizer: The optimizer, without its state. To restore the state, call
        ``restore_checkpoint``.
    """
    if not isinstance(like, Template):
        path = pathlib.Path(like)
        path = path / TEMPLATE if path.is_dir() else path
        found = torch_checkpoint.load(path)
        if not is_template(found):
            raise ConvertError(
                f"{path} is not a template. Pass a folder that mlx_gradscale convert "
                "wrote, or its template.pt."
            )
        like = from_object(found)
    if not like.groups:
        raise ConvertError(
            "The template has no optimizer state. Create the optimizer yourself."
        )
    return optimizers.build(like.groups, learning_rate)
