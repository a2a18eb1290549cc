"""A PyTorch checkpoint as a template for conversion to MLX and back."""

import pathlib
from collections.abc import Set
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..core.scale import DEFAULTS, from_state_dict, to_state_dict
from ..files.text import list_some
from . import optimizers
from .folder import trainer_state
from .groups import Group, read_groups
from .names import Plan, make_plan
from .old_checkpoint import TensorShape
from .options import Options
from .order import Order
from .sections import Sections, find_sections
from .tree import ConvertError, Path, get, is_tensor, items, number, show


@dataclass
class Template:
    """A PyTorch checkpoint, and where each array of the MLX run belongs in it.

    ``template["epoch"] = 4`` sets an entry of the checkpoint.

    Attributes:
        checkpoint (Any): The PyTorch object. Tensors that MLX holds are
            ``TensorShape`` leaves.
        files (dict, optional): For a folder, the paths of the files that are not in
            ``checkpoint``, by name. They are copied.
    """

    checkpoint: Any
    files: dict[str, pathlib.Path] | None
    options: Options
    sections: Sections
    plan: Plan = field(default_factory=Plan)
    groups: list[Group] = field(default_factory=list)  # of all optimizers
    names: list[str] = field(default_factory=list)  # of the parameters in all groups
    updated: set[str] = field(default_factory=set)  # entries that the user set

    def __post_init__(self) -> None:
        kind = self.options.optimizer
        for path in self.sections.optimizers:
            self.groups += read_groups(get(self.checkpoint, path), kind)
        self.scaler_state()  # raises if it is damaged

    def __getitem__(self, key: Any) -> Any:
        return self.checkpoint[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        self.checkpoint[key] = value
        self.updated.add(show((key,)))

    def tensors(self) -> dict[str, Any]:
        """Return the model's tensors by their PyTorch names."""
        held = get(self.checkpoint, self.sections.model)
        return {name: x for name, x in held.items() if is_tensor(x)}

    def order(self) -> Order:
        """Return the object that matches names to the optimizers' parameters."""
        return Order(self.groups, self.tensors(), self.plan)

    def assign(self, names: list[str]) -> None:
        """Set the PyTorch names of the optimizers' parameters, group by group."""
        self.names, step = names, trainer_state(self.checkpoint).get("global_step")
        optimizers.plan_groups(self.groups, names, self.plan.entries, step)

    def scaler_state(self) -> dict[str, Any] | None:
        """Return the state dict for a ``GradScaler``, or None if there is no scaler."""
        if self.sections.scaler is None:
            return None
        held = get(self.checkpoint, self.sections.scaler)
        try:
            values = from_state_dict({k: number(x) for k, x in held.items()}, DEFAULTS)
        except (KeyError, TypeError, ValueError) as error:
            problem = error.args[0]
            raise ConvertError(f"The scaler state is damaged: {problem}") from error
        return to_state_dict(values)

    def drop_tensors(self, rounded: Set[str], trained: Set[str]) -> None:
        """Replace the tensors that MLX holds with their shapes.

        MLX holds all weights but those in ``rounded``, and the moments of the
        parameters in ``trained``, by their MLX names.
        """
        held = get(self.checkpoint, self.sections.model)
        for name, entry in self.plan.entries.items():
            if rounded.isdisjoint(entry.mlx):
                held[name] = TensorShape.of(held[name])
        for alias, name in self.plan.tied.items():
            held[alias] = held[name]
        for group in self.groups:
            for index, entry in group.entries.items():
                slots = group.slots(index) if entry.mlx[0] in trained else {}
                for slot in group.spec.slots:
                    if slots.get(slot) is not None:
                        slots[slot] = TensorShape.of(slots[slot])

    def entries_beside(self) -> dict[str, Any]:
        """Return the entries outside the model, optimizers and scaler, by path."""
        sections, model = self.sections, self.sections.model
        scalers = [] if sections.scaler is None else [sections.scaler]
        paths = [model, *sections.optimizers, *scalers]
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


def make_template(
    checkpoint: Any,
    model: nn.Module | None,
    options: Options,
    files: dict[str, pathlib.Path] | None = None,
) -> tuple[Template, list[str]]:
    """Find out how a checkpoint maps to MLX; return a template and a list of notes."""
    found = find_sections(checkpoint, options.keys)
    if model is None:
        raise ConvertError(
            "The MLX model, which determines names, layouts and shapes, is missing. "
            "Pass it (--model). build_optimizer() needs a folder that mlx_gradscale "
            "convert wrote."
        )
    template = Template(checkpoint, files, options, found)
    arrays = template.tensors()
    arrays = {name: x for name, x in arrays.items() if isinstance(x, mx.array)}
    template.plan = make_plan(arrays, model, options)
    notes = found.notes + template.plan.notes
    if template.groups:
        # A safetensors file does not preserve PyTorch's order of tensors.
        file = str(found.model[0]) if files is not None else ""
        is_ordered = not file.endswith(".safetensors")
        names, doubts = template.order().find(options, model, is_ordered)
        template.assign(names)
        notes += optimizers.check_groups(template.groups, options.accept) + doubts
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
