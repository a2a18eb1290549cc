"""Convert optimizer state: PyTorch's parameter groups <-> MLX's flat tree.

MLX's side is ``tree_flatten(optimizer.state)``: ``step``, ``learning_rate`` and
``<parameter>.<slot>``, each under ``states.<i>.`` for a ``MultiOptimizer``.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.optimizers as optim

from .layouts import Entry
from .optimizer_section import Index, OptimizerSection, is_number, need
from .optimizer_table import (
    OPTIMIZERS,
    SCHEDULED,
    Difference,
    OptimizerSpec,
    check_differences,
    mlx_differences,
    plain_setting,
    recognise,
    torch_differences,
)
from .options import Options
from .tree import ConvertError, Write, as_leaf, list_some, number

# A learning rate as in mlx.optimizers: a number, or a function of the step.
Rate = float | mx.array | Callable[[mx.array], mx.array]


@dataclass
class TorchGroup:
    """A parameter group of an optimizer, with the parameters that MLX has.

    Attributes:
        section (OptimizerSection): The optimizer's state dict.
        number (int): Index of the group in the optimizer.
        kind (str): A key of :data:`OPTIMIZERS`.
        names (dict): Index in the optimizer's state -> PyTorch parameter name.
        step (int): The step count at conversion.
    """

    section: OptimizerSection
    number: int
    kind: str
    names: dict[Index, str]
    step: int = 0

    @property
    def spec(self) -> OptimizerSpec:
        """The optimizer's row in the table."""
        return OPTIMIZERS[self.kind]

    @property
    def settings(self) -> dict[str, Any]:
        """The PyTorch group."""
        return self.section.groups[self.number]

    def lacks_state(self, index: Index) -> bool:
        """Return whether PyTorch has no state for a parameter yet."""
        slots = self.section.slots(index)
        return any(slots.get(slot) is None for slot in self.spec.slots)

    def check(self) -> None:
        """Raise on settings that are not numbers."""
        for key in (*self.spec.settings, *SCHEDULED):
            value = self.settings.get(key)
            if key == "betas":
                pair = value if isinstance(value, (list, tuple)) else ()
                is_right = len(pair) == 2 and all(map(is_number, pair))
                need(is_right, key, "two numbers", value)
            elif value is not None or key in self.spec.settings:
                need(is_number(value), key, "a number", value)


@dataclass
class OptimizerPlan:
    """PyTorch's groups as one MLX optimizer, or as the parts of a MultiOptimizer."""

    sections: list[OptimizerSection]
    groups: list[TorchGroup]
    is_single: bool

    def prefixes(self) -> list[str]:
        """Return the key prefix of each group's MLX state."""
        return [
            "" if self.is_single else f"states.{i}." for i in range(len(self.groups))
        ]


def plan_optimizer(
    sections: Sequence[OptimizerSection],
    names: Sequence[Mapping[Index, str]],
    entries: Mapping[str, Entry],
    options: Options,
) -> tuple[OptimizerPlan, list[str]]:
    """Plan the conversion of a model's optimizers and check that MLX supports them.

    ``names`` maps, for each optimizer, parameter indices to PyTorch names.
    """
    if options.step is not None and options.step < 0:
        raise ConvertError(f"--step {options.step}: a count cannot be negative.")
    groups: list[TorchGroup] = []
    found: list[Difference] = []
    torch_only: list[str] = []
    for section, own in zip(sections, names, strict=True):
        kind = kind_of(section, options)
        for i, settings in enumerate(section.groups):
            members = {n: own[n] for n in settings["params"] if own[n] in entries}
            torch_only += [own[n] for n in settings["params"] if n not in members]
            group = TorchGroup(section, i, kind, members)
            group.check()
            is_complete = not any(map(group.lacks_state, members))
            found += torch_differences(kind, settings, is_complete)
            groups.append(group)
    _set_steps(groups, options.step or 0)
    # Groups with the same update rule and schedule become one optimizer.
    signatures = {
        repr((g.kind, constructor_args(g.kind, g.settings)))
        + repr([number(g.settings.get(key)) for key in sorted(SCHEDULED)])
        for g in groups
    }
    is_single = len(signatures) == len({g.step for g in groups}) == 1
    plan = OptimizerPlan([*sections], groups, is_single)
    notes = [g.spec.note for g in groups if g.spec.note]
    notes += check_differences(found, options.accept)
    return plan, notes + _plan_notes(plan, torch_only, options)


def kind_of(section: OptimizerSection, options: Options) -> str:
    """Return the key of :data:`OPTIMIZERS` for a state dict, or raise."""
    slots = {slot for slots in section.states.values() for slot in slots}
    return recognise(section.groups, slots, options.optimizer)


def _set_steps(groups: Sequence[TorchGroup], default: int) -> None:
    """Read the step count of each group; MLX has one per group, not per parameter."""
    known: list[int | None] = []
    for group in groups:
        counts: dict[int, str] = {}
        for index, name in group.names.items():
            step = group.section.slots(index).get("step")
            if step is not None:
                counts.setdefault(int(number(step)), name)
        if len(counts) > 1:
            said = [f"{name} at {step}" for step, name in sorted(counts.items())]
            raise ConvertError(
                f"The parameters of a group are at different steps ({list_some(said)}),"
                " and MLX keeps one count for all. Put them in groups of their own, or "
                "bring them to one count before saving."
            )
        known.append(next(iter(counts), None))
    seen = {step for step in known if step is not None}
    filler = seen.pop() if len(seen) == 1 else default
    for group, step in zip(groups, known, strict=True):
        group.step = filler if step is None else step


def _plan_notes(
    plan: OptimizerPlan, torch_only: list[str], options: Options
) -> list[str]:
    notes = []
    if torch_only:
        notes.append(
            f"The optimizer state of {list_some(torch_only)} goes back unchanged, as "
            "the MLX model has no such parameters."
        )
    fresh = [
        name
        for group in plan.groups
        for index, name in group.names.items()
        if group.spec.has_step and group.step and group.lacks_state(index)
    ]
    if fresh:
        notes.append(
            f"{list_some(fresh, 3)} had no optimizer state in PyTorch, as frozen "
            "parameters have: freeze them in the MLX model, too, before loading. If "
            "they are trained, they start with zero moments, and with the step count "
            "of the rest."
        )
    kinds = {group.kind for group in plan.groups if not group.spec.has_step}
    if kinds and options.step is None:
        said = " and ".join(sorted(kinds))
        notes.append(f"{said} keeps no step count: MLX's starts at 0 (--step).")
    if any("max_momentum" in group.settings for group in plan.groups):
        notes.append(  # from OneCycleLR and CyclicLR
            "PyTorch's schedule moves the momentum (or betas[0]) as well: in MLX it "
            "stays as it is now, unless you set it before each step."
        )
    return notes


def to_mlx(
    plan: OptimizerPlan, entries: Mapping[str, Entry], tensors: Mapping[str, mx.array]
) -> dict[str, mx.array]:
    """Return the flat MLX state, with zeros for parameters without state."""
    flat: dict[str, mx.array] = {}
    for group, prefix in zip(plan.groups, plan.prefixes(), strict=True):
        rate = number(group.settings["lr"])
        flat[f"{prefix}step"] = mx.array(group.step, mx.uint64)
        flat[f"{prefix}learning_rate"] = mx.array(rate, mx.float32)
        for index, name in group.names.items():
            like = tensors[name]
            for theirs, ours in group.spec.slots.items():
                moment = group.section.slots(index).get(theirs)
                moment = mx.zeros_like(like) if moment is None else moment
                what = f"{theirs} of {name}"
                need(isinstance(moment, mx.array), what, "a tensor", moment)
                if moment.shape != like.shape:
                    raise ConvertError(
                        f"{what} has shape {moment.shape}, the parameter {like.shape}: "
                        "the names are in another order. Give them with names=... "
                        "(--names)."
                    )
                for mlx_name, array in entries[name].to_mlx(moment).items():
                    flat[f"{prefix}{mlx_name}.{ours}"] = array
    return flat


def to_torch(
    plan: OptimizerPlan,
    entries: Mapping[str, Entry],
    flat: Mapping[str, mx.array],
    settings: Sequence[Mapping[str, Any]],
    accept: Iterable[str] = (),
) -> tuple[list[Write], list[str]]:
    """Return the writes that update PyTorch's state dicts from MLX, and notes.

    ``flat`` is ``tree_flatten(optimizer.state)`` as a dict; ``settings`` holds those of
    each MLX optimizer (:func:`mlx_settings`).
    """
    wanted = 1 if plan.is_single else len(plan.groups)
    if len(settings) != wanted:
        raise ConvertError(
            f"The MLX optimizer has {len(settings)} parts, and PyTorch's "
            f"{len(plan.groups)} parameter groups need "
            f"{'one optimizer' if wanted == 1 else f'a MultiOptimizer of {wanted}'}."
        )
    writes: list[Write] = []
    found: list[Difference] = []
    rates: list[str] = []
    for i, (group, prefix) in enumerate(zip(plan.groups, plan.prefixes(), strict=True)):
        used = settings[0 if plan.is_single else i]
        step = float(number(_required(flat, f"{prefix}step")))
        if not 0 <= step < 2**53:
            raise ConvertError(
                f"The MLX optimizer's {prefix}step is {step}, which is no count."
            )
        found += mlx_differences(group.kind, used)
        rate = number(_required(flat, f"{prefix}learning_rate"))
        changed = _changed_settings(group, used, used.get("next_rate", rate))
        for key, value in changed.items():
            writes += group.section.write_setting(group.number, key, value)
        if used.get("has_schedule"):
            rates.append(f"{number((group.settings | changed)['lr']):.6g}")
        for index, name in group.names.items():
            slots = _torch_slots(group, index, entries[name], flat, prefix, int(step))
            if slots and group.spec.has_step:
                count = _torch_step(group.section, index, int(step))
                slots = {"step": count} | slots
            writes += group.section.write_state(index, slots)
    notes = check_differences(found, accept)
    if rates:
        notes.append(
            "MLX's learning rate schedule is not converted: PyTorch gets its rate for "
            f"the next step, {', '.join(dict.fromkeys(rates))}."
        )
    return writes, notes


def _required(flat: Mapping[str, Any], key: str) -> Any:
    if key not in flat:
        raise ConvertError(
            f"The MLX optimizer state has no {key!r}: call optimizer.init(model."
            "trainable_parameters()) or make a step first."
        )
    return flat[key]


def _torch_slots(
    group: TorchGroup,
    index: Index,
    entry: Entry,
    flat: Mapping[str, mx.array],
    prefix: str,
    step: int,
) -> dict[str, Any]:
    """Return the slots to write, or none if PyTorch's are already correct."""
    old, slots = group.section.slots(index), group.spec.slots
    keys = [f"{prefix}{n}.{ours}" for n in entry.mlx for ours in slots.values()]
    if not any(key in flat for key in keys):  # frozen in MLX
        if any(old.get(s) is not None and not _is_array(old[s]) for s in slots):
            raise ConvertError(
                f"{entry.mlx[0]} has no state in the MLX optimizer, and had one when "
                "it was loaded: give the optimizer that was trained."
            )
        return {}
    new = {
        theirs: entry.to_torch(
            {n: _required(flat, f"{prefix}{n}.{ours}") for n in entry.mlx}
        )
        for theirs, ours in slots.items()
    }
    if group.lacks_state(index):
        # PyTorch starts a missing momentum buffer with the undampened gradient, MLX
        # with the dampened one. They agree if the buffer is written as zeros.
        is_dampened = number(group.settings.get("dampening", 0))
        has_moved = group.spec.has_step and step != group.step
        is_zero = not any(mx.any(x).item() for x in new.values())
        if is_zero and not has_moved and not is_dampened:
            return {}
    return {slot: as_leaf(x, old.get(slot)) for slot, x in new.items()}


def _torch_step(section: OptimizerSection, index: Index, step: int) -> Any:
    """Return a step count as PyTorch wrote it: a number or a one-element array."""
    known = [section.slots(index), *section.states.values()]
    steps = (slots.get("step") for slots in known)
    like = next((each for each in steps if each is not None), mx.array(0.0))
    if isinstance(like, mx.array):
        return mx.full(like.shape, step, like.dtype)
    return float(step) if type(like) is float else step


def _changed_settings(
    group: TorchGroup, used: Mapping[str, Any], rate: float
) -> dict[str, Any]:
    """Return the settings that have changed since PyTorch, in PyTorch's types."""
    settings, changed = group.settings, {}
    expected = constructor_args(group.kind, settings)
    for theirs, ours in group.spec.settings.items():
        if theirs != "lr" and ours in used and used[ours] != expected[ours]:
            is_tuple = isinstance(settings[theirs], tuple)
            changed[theirs] = tuple(used[ours]) if is_tuple else used[ours]
    # Compare with a tolerance: a schedule may have run on another device or compiled,
    # and MLX's learning rate is float32.
    if not math.isclose(number(settings["lr"]), rate, rel_tol=1e-6):
        changed["lr"] = rate
    for key, value in changed.items():
        if _is_array(settings[key]):
            changed[key] = mx.array(value, settings[key].dtype)
    for key, (off, _) in group.spec.refused.items():  # accepted settings stay off
        value = plain_setting(settings.get(key))
        if key not in group.spec.settings and value not in (*off, None):
            is_plain = isinstance(value, (bool, int, float))
            changed[key] = type(value)(off[0]) if is_plain else off[0]
    return changed


def _is_array(value: Any) -> bool:
    return isinstance(value, mx.array)


def constructor_args(kind: str, group: Mapping[str, Any]) -> dict[str, Any]:
    """Return MLX constructor arguments equivalent to a PyTorch group's settings."""
    spec = OPTIMIZERS[kind]
    out = {ours: plain_setting(group[theirs]) for theirs, ours in spec.settings.items()}
    out = {key: [*x] if isinstance(x, tuple) else x for key, x in out.items()}
    return out | spec.forced


def build(
    plan: OptimizerPlan,
    entries: Mapping[str, Entry],
    learning_rate: Rate | Sequence[Rate] | None = None,
) -> optim.Optimizer:
    """Build the MLX optimizer that resumes from PyTorch's groups.

    If the groups differ, it is a ``MultiOptimizer``.
    """
    groups = plan.groups[:1] if plan.is_single else plan.groups
    rates = _rates([group.settings for group in groups], learning_rate)
    parts = [
        group.spec.mlx(
            **constructor_args(group.kind, group.settings) | {"learning_rate": rate}
        )
        for group, rate in zip(groups, rates, strict=True)
    ]
    if len(parts) == 1:
        return parts[0]
    members = [{n for t in g.names.values() for n in entries[t].mlx} for g in groups]
    filters = [lambda path, _, own=own: path in own for own in members[:-1]]
    return optim.MultiOptimizer(parts, filters)


def _rates(groups: Sequence[Mapping[str, Any]], given: Any) -> list[Rate]:
    own: list[Rate] = [number(group["lr"]) for group in groups]
    if given is None:
        return own
    if isinstance(given, (list, tuple)):
        if len(given) != len(groups):
            raise ValueError(
                f"learning_rate has {len(given)} entries and the MLX optimizer "
                f"{len(groups)} parts: give one for each parameter group; groups with "
                "equal settings are one part."
            )
        return [*given]
    # In the first step of a warmup all rates are 0, and only these distinguish groups.
    first = [number(group.get("initial_lr") or group["lr"]) for group in groups]
    for rates in (own, first):
        if len(set(rates)) > 1:
            raise ValueError(
                f"The parameter groups have different learning rates ({rates}): give "
                "learning_rate as a list, a number or schedule for each in this order."
            )
    return [given] * len(groups)


def mlx_settings(optimizer: optim.Optimizer) -> list[dict[str, Any]]:
    """Return the class, settings and next learning rate of each single optimizer."""
    if isinstance(optimizer, optim.MultiOptimizer):
        return [row for part in optimizer.optimizers for row in mlx_settings(part)]
    schedule = getattr(optimizer, "_schedulers", {}).get("learning_rate")
    row = {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in vars(optimizer).items()
        if not name.startswith("_")
    }
    row |= {"class": type(optimizer).__name__, "has_schedule": schedule is not None}
    if schedule is not None and "step" in optimizer.state:
        # MLX's state holds the last step's rate, PyTorch's groups the next step's.
        row["next_rate"] = number(mx.array(schedule(optimizer.step)))
    return [row]
