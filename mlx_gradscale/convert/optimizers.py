"""Convert between PyTorch's parameter groups and MLX's optimizers and their state.

A state dict identifies parameters by number or by name. torch.distributed may flatten
the state dict (``state.<name>.<slot>``) or write the numbers as strings. MLX's side is
``tree_flatten(optimizer.state)``: ``step``, ``learning_rate`` and
``<parameter>.<slot>``, each under ``states.<i>.`` for a ``MultiOptimizer``.
"""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import mlx.core as mx
import mlx.optimizers as optim

from ..checkpoint import Checkpoint
from ..files.text import list_some
from ..torch_checkpoint import Tensor
from .files import ConvertError, match_type, number
from .layouts import Row, Shape
from .optimizer_table import (
    DECOUPLED,
    IGNORED,
    OFF,
    OPTIMIZERS,
    REFUSED,
    SCHEDULED,
    OptimizerSpec,
    check_differences,
    find_differences,
    plain_settings,
    recognize,
)
from .sections import is_flat

# A learning rate as in mlx.optimizers: a number, or a function of the step.
Rate = float | mx.array | Callable[[mx.array], mx.array]
Index = int | str


@dataclass
class Group:
    """A parameter group of a PyTorch optimizer, and its place in the MLX state."""

    held: dict[Any, Any]  # the optimizer's state dict in the checkpoint
    settings: dict[str, Any]
    plain: dict[str, Any]  # the settings as plain numbers and lists
    slots: dict[Index, dict[str, Any]]  # each parameter's state; empty if it has none
    kind: str  # a key of OPTIMIZERS
    spec: OptimizerSpec
    rows: dict[Index, Row] = field(default_factory=dict)  # parameters that MLX has
    step: int = 0  # in the PyTorch checkpoint
    # The prefix of the group's MLX state: "states.<i>." in a MultiOptimizer, and empty
    # if one MLX optimizer covers all groups.
    prefix: str = ""

    @property
    def arguments(self) -> dict[str, Any]:
        """MLX constructor arguments equivalent to the settings."""
        own = {key: self.plain[key] for key in self.spec.settings}
        # An integer, as in torch.optim.SGD(params, lr=1), would be an int32 array.
        return own | self.spec.forced | {"learning_rate": float(self.plain["lr"])}

    @property
    def members(self) -> set[str]:
        """The MLX names of the parameters."""
        return {name for row in self.rows.values() for name in row.mlx}

    def lacks_state(self, index: Index) -> bool:
        """Return whether the checkpoint lacks any of a parameter's moments."""
        return any(self.slots[index].get(slot) is None for slot in self.spec.slots)

    def shape(self, index: Index) -> Shape | None:
        """Return the shape of a parameter's moments, or None if there are none."""
        moments = [self.slots[index].get(slot) for slot in self.spec.slots]
        shapes = [tuple(x.shape) for x in moments if x is not None]
        if len({*shapes}) > 1:
            raise ValueError(f"the moments of parameter {index} differ in shape")
        return shapes[0] if shapes else None

    def moments(self) -> Iterator[tuple[Index, Row]]:
        """Yield the rows that map the parameters' slots to the flat MLX state."""
        for index, row in self.rows.items():
            for slot, ours in self.spec.slots.items():
                names = tuple(f"{self.prefix}{name}.{ours}" for name in row.mlx)
                yield index, replace(row, torch=slot, mlx=names)

    def write(self) -> None:
        """Write the settings, and slots that are new, into the state dict."""
        if is_flat(self.held):
            own = {key: x for key, x in self.settings.items() if key != "params"}
            for index, slots in self.slots.items():
                for part, values in (("state", slots), ("param_groups", own)):
                    path = f"{part}.{index}."
                    self.held |= {f"{path}{key}": x for key, x in values.items()}
            return
        states = self.held.setdefault("state", {})
        for index, slots in self.slots.items():
            if slots:  # the index is a number, or a string that contains one
                states[type(next(iter(states), index))(index)] = slots


def read_groups(held: dict[Any, Any]) -> list[Group]:
    """Return the groups of a nested or flat state dict."""
    nested = _nest(held) if is_flat(held) else held
    states = nested.get("state", {})
    # torch.distributed.checkpoint writes numbers as strings.
    by_text = {str(index): slots for index, slots in states.items()}
    groups = nested["param_groups"]
    plain = [plain_settings(settings) for settings in groups]
    slots = [{i: by_text.get(str(i)) or {} for i in x["params"]} for x in groups]
    kind = recognize(plain, {slot for state in states.values() for slot in state})
    return [
        Group(held, *parts, kind, OPTIMIZERS[kind])
        for parts in zip(groups, plain, slots, strict=True)
    ]


def _nest(held: dict[str, Any]) -> dict[str, Any]:
    """Return a flat state dict as PyTorch nests it.

    Parameters with equal settings form a group.
    """
    parts: dict[str, dict[str, Any]] = {"state": {}, "param_groups": {}}
    for key, value in held.items():
        part, _, path = key.partition(".")
        name, _, last = path.rpartition(".")
        parts[part].setdefault(name, {})[last] = value
    groups: dict[str, dict[str, Any]] = {}
    for name, settings in parts["param_groups"].items():
        alike = repr(sorted(plain_settings(settings).items()))
        groups.setdefault(alike, {**settings, "params": []})["params"].append(name)
    return parts | {"param_groups": [*groups.values()]}


def plan_groups(
    groups: Sequence[Group],
    names: Sequence[str],
    rows: Mapping[str, Row],
    trainer_step: Any = None,
) -> None:
    """Set the rows, steps and prefixes of the groups.

    ``names`` are the PyTorch names of all parameters, group by group. ``trainer_step``
    is the default for step counts that PyTorch did not save.
    """
    left = iter(names)
    known: list[dict[int, str]] = []  # MLX has one step count per optimizer
    for group in groups:
        own = dict(zip(group.slots, left, strict=False))
        group.rows = {i: rows[name] for i, name in own.items() if name in rows}
        steps = {row.torch: group.slots[i].get("step") for i, row in group.rows.items()}
        counts = {int(number(x)): n for n, x in steps.items() if x is not None}
        if len(counts) > 1:
            shown = [f"{name} at {step}" for step, name in sorted(counts.items())]
            raise ConvertError(
                "The parameters of a group are at different steps "
                f"({list_some(shown)}), but MLX has one step count per optimizer. Put "
                "each step count in its own parameter group in PyTorch."
            )
        known.append(counts)
    every = {step for counts in known for step in counts}
    is_count = type(trainer_step) is int and 0 <= trainer_step < 2**53
    default = every.pop() if len(every) == 1 else trainer_step if is_count else 0
    rules = []
    for group, counts in zip(groups, known, strict=True):
        group.step = next(iter(counts), default)
        schedule = [group.plain.get(key) for key in SCHEDULED]
        rules.append((group.kind, group.step, group.arguments, schedule))
    # Each group needs its own MLX optimizer if update rules, rates or steps differ.
    if any(rule != rules[0] for rule in rules):
        for i, group in enumerate(groups):
            group.prefix = f"states.{i}."


def check_groups(groups: Sequence[Group], accept: Collection[str]) -> list[str]:
    """Raise if MLX would update differently, unless accepted; return notes."""
    found: dict[str, str] = {}
    for group in groups:
        spec, plain = group.spec, group.plain
        found |= find_differences(spec, group.kind, plain)
        is_decayed = group.kind == "AdamW" and plain["weight_decay"]
        if is_decayed and plain.get(DECOUPLED) is not True:
            found[DECOUPLED] = (
                "The PyTorch version that saved the optimizer did not record whether "
                "it is AdamW, which MLX has, or Adam with weight decay, which differs."
            )
        known = {*spec.settings, *spec.required, *spec.refused, *REFUSED, *IGNORED}
        found |= {
            key: f"The parameter groups have the key {key!r}, which {group.kind} does "
            "not have, so this may be a different optimizer."
            for key in plain
            if key not in known
        }
    notes = [group.spec.note for group in groups if group.spec.note]
    notes += check_differences(found, accept)
    fresh = [
        row.torch
        for group in groups
        for index, row in group.rows.items()
        if group.lacks_state(index)
    ]
    if 0 < len(fresh) < sum(len(group.rows) for group in groups):
        notes.append(
            f"PyTorch has no optimizer state for {list_some(fresh, 3)}. The moments of "
            "these parameters start at zero. If they were frozen in PyTorch, freeze "
            "them in the MLX model before loading."
        )
    unknown = {g.kind for g in groups if not g.spec.has_step and not g.step}
    if unknown:
        notes.append(
            f"{', '.join(sorted(unknown))} saves no step count, so MLX starts at step "
            "0. If you pass a schedule, set state['step'] of the MLX optimizer or, for "
            "a MultiOptimizer, of each of its .optimizers."
        )
    return notes


def to_torch(
    groups: Sequence[Group], run: Checkpoint, accept: Collection[str]
) -> list[str]:
    """Write an MLX run's steps, rates and settings into PyTorch's groups.

    The moments are there already. Return notes.
    """
    settings, next_rates = run.description["settings"], run.description["next_rates"]
    count = len(groups) if groups[0].prefix else 1
    if len(settings) != count:
        wanted = "one optimizer" if count == 1 else f"a MultiOptimizer of {count}"
        raise ConvertError(
            f"The MLX run's optimizer count is {len(settings)}, but the original needs "
            f"{wanted}. Create it with load_torch() or build_optimizer()."
        )
    found: dict[str, str] = {}
    for i, group in enumerate(groups):
        at = i if group.prefix else 0
        used, next_rate = settings[at], next_rates[at]
        if used["class"] != group.spec.mlx.__name__:
            raise ConvertError(
                f"The MLX optimizer is {used['class']}, but the original's optimizer "
                f"is {group.kind}. Pass a PyTorch checkpoint of a run with "
                f"{used['class']} as like= (--like)."
            )
        found |= find_differences(group.spec, f"MLX's {used['class']}", used["values"])
        rate = float(run.optimizer[f"{group.prefix}learning_rate"])
        if "learning_rate" in used["schedules"]:
            if next_rate is None or not math.isfinite(next_rate):
                found["learning_rate"] = (
                    "The MLX run has a learning rate schedule, but its checkpoint "
                    f"contains only the rate of the last step, {rate:.6g}, and PyTorch "
                    "needs the next one. Restore the checkpoint in MLX with the "
                    "schedule, and save it again."
                )
            else:
                rate = next_rate
        _write_steps(group, run.optimizer)
        _write_settings(group, used["values"], rate)
        group.write()
    return check_differences(found, accept)


def _write_steps(group: Group, state: Mapping[str, Any]) -> None:
    """Write the step count of the parameters that were trained in MLX."""
    step = int(number(state[f"{group.prefix}step"]))
    # PyTorch's version decides whether a step count is a number or an array.
    old = [x["step"] for x in group.slots.values() if x.get("step") is not None]
    like = old[0] if old else Tensor.of(mx.array(0.0))
    for index, row in group.moments() if group.spec.has_step else ():
        if row.mlx[0] in state and not group.lacks_state(index):
            group.slots[index]["step"] = match_type(step, like)


def _write_settings(group: Group, used: Mapping[str, Any], rate: float) -> None:
    """Write the settings that changed, in PyTorch's types."""
    plain, spec = group.plain, group.spec
    changed = {k: used[k] for k in spec.settings if used.get(k, plain[k]) != plain[k]}
    # MLX's learning rate is float32, and compiled schedules or other devices round
    # differently.
    if not math.isclose(plain["lr"], rate, rel_tol=1e-6):
        changed["lr"] = rate
    # Turn off the settings that MLX ignored with the user's consent.
    changed |= {key: OFF.get(key, 0) for key in find_differences(spec, "", plain)}
    for key, value in changed.items():
        group.settings[key] = match_type(value, group.settings[key])


# A class of MLX, its constructor arguments, and the parameters that are its own.
_Part = tuple[type[optim.Optimizer], dict[str, Any], Collection[str]]


def build(groups: Sequence[Group], learning_rate: Any = None) -> optim.Optimizer:
    """Build the MLX optimizer, a ``MultiOptimizer`` if PyTorch's groups differ."""
    parts: list[_Part] = [
        (group.spec.mlx, group.arguments, group.members)
        for group in (groups if groups[0].prefix else groups[:1])
    ]
    return _join(parts, learning_rate)


def subtree(prefix: str, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries whose path starts with a prefix, without the prefix."""
    return {k.removeprefix(prefix): x for k, x in state.items() if k.startswith(prefix)}


def rebuild(
    settings: Sequence[Mapping[str, Any]],
    state: Mapping[str, Any],
    learning_rate: Any = None,
) -> optim.Optimizer:
    """Build the optimizer that the settings and the state of a checkpoint describe."""
    classes = {spec.mlx.__name__: spec.mlx for spec in OPTIMIZERS.values()}
    unknown = [row["class"] for row in settings if row["class"] not in classes]
    if unknown or not settings:
        raise ConvertError(
            f"The run's optimizer is {list_some(unknown) or 'missing'}, which is not "
            "one that PyTorch runs are converted to. Create it with mlx.optimizers."
        )
    parts: list[_Part] = []
    for i, row in enumerate(settings):
        own = subtree(f"states.{i}.", state) if len(settings) > 1 else state
        arguments = row["values"] | {"learning_rate": float(own["learning_rate"])}
        members = {key.rpartition(".")[0] for key in own}
        parts.append((classes[row["class"]], arguments, members))
    return _join(parts, learning_rate)


def _join(parts: Sequence[_Part], given: Any) -> optim.Optimizer:
    """Build an optimizer of each part, with the user's rates if any were given.

    A single rate is for all parts if their own rates are equal.
    """
    own = [arguments["learning_rate"] for _, arguments, _ in parts]
    rates = own if given is None else given
    if not isinstance(rates, (list, tuple)) and len({*own}) == 1:
        rates = [rates] * len(parts)
    if not isinstance(rates, (list, tuple)) or len(rates) != len(parts):
        what = f"a list of {len(parts)} numbers or schedules, one per optimizer"
        what = what if len(parts) > 1 else "a number or a schedule"
        raise ConvertError(
            f"learning_rate must be {what}, got {given!r}. In the checkpoint, it is "
            f"{own}."
        )
    made = [
        cls(**arguments | {"learning_rate": rate})
        for (cls, arguments, _), rate in zip(parts, rates, strict=True)
    ]
    filters = [lambda path, _, own=own: path in own for *_, own in parts[:-1]]
    return made[0] if len(made) == 1 else optim.MultiOptimizer(made, filters)
