"""Optimizer states: PyTorch's parameter groups <-> MLX's flat tree.

MLX's side is ``tree_flatten(optimizer.state)``: ``step``, ``learning_rate`` and
``<parameter>.<slot>``, each under ``states.<i>.`` for a ``MultiOptimizer``.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import mlx.core as mx
import mlx.optimizers as optim

from .layouts import Entry
from .optimizer_section import Index, OptimizerSection, is_number, need
from .optimizer_table import (
    OPTIMIZERS,
    SCHEDULED,
    Difference,
    check_differences,
    mlx_differences,
    plain_setting,
    recognise,
    torch_differences,
)
from .options import Options
from .tree import ConvertError, Write, as_leaf, list_some, number

# A learning rate as mlx.optimizers take it: a number, or a function of the step.
Rate = float | mx.array | Callable[[mx.array], mx.array]


@dataclass
class TorchGroup:
    """One of PyTorch's parameter groups, and its parameters that MLX has.

    Attributes:
        section (int): Which of the checkpoint's optimizers it belongs to.
        number (int): Which of that optimizer's groups it is.
        kind (str): A key of :data:`OPTIMIZERS`.
        indices (list): Of its parameters in the optimizer's state.
        names (list): PyTorch's names of the same.
        step (int): Its step count when it was converted.
    """

    section: int
    number: int
    kind: str
    indices: list[Index]
    names: list[str]
    step: int


@dataclass
class OptimizerPlan:
    """How PyTorch's groups became one MLX optimizer.

    Attributes:
        groups (list): In the order of the optimizers and their groups.
        is_single (bool): Whether all groups became one optimizer; otherwise they are
            the parts of a ``MultiOptimizer``.
    """

    groups: list[TorchGroup]
    is_single: bool

    def prefix(self, group: int) -> str:
        """Return how the MLX state of a group begins."""
        return "" if self.is_single else f"states.{group}."


def plan_optimizer(
    sections: Sequence[OptimizerSection],
    names: Sequence[Mapping[Index, str]],
    entries: Mapping[str, Entry],
    options: Options,
) -> tuple[OptimizerPlan, list[str]]:
    """Plan the conversion of a model's optimizers, and check that MLX can compute it.

    ``names`` hold, for each optimizer, the parameter's PyTorch name by its index.
    """
    if options.step is not None and options.step < 0:
        raise ConvertError(f"--step {options.step}: a count cannot be negative.")
    groups: list[TorchGroup] = []
    found: list[Difference] = []
    notes: list[str] = []
    torch_only: list[str] = []
    for i, section in enumerate(sections):
        kind = kind_of(section, options)
        notes += OPTIMIZERS[kind].notes
        for j, settings in enumerate(section.groups):
            check_settings(kind, settings)
            own = [names[i][index] for index in settings["params"]]
            members = [n for n in settings["params"] if names[i][n] in entries]
            torch_only += [name for name in own if name not in entries]
            group = TorchGroup(i, j, kind, members, [names[i][n] for n in members], 0)
            is_complete = not any(_lacks(kind, section.slots(n)) for n in members)
            found += torch_differences(kind, settings, is_complete)
            doubt = OPTIMIZERS[kind].doubt(settings)
            notes += [doubt] if doubt and doubt not in notes else []
            groups.append(group)
    _set_steps(groups, sections, options.step or 0)
    signatures = {
        _signature(g.kind, sections[g.section].groups[g.number]) for g in groups
    }
    plan = OptimizerPlan(groups, len(signatures) == len({g.step for g in groups}) == 1)
    notes += check_differences(found, options.accept)
    return plan, notes + _plan_notes(plan, sections, torch_only, options)


def kind_of(section: OptimizerSection, options: Options) -> str:
    """Return the key of :data:`OPTIMIZERS` for a state dict, or raise."""
    slots = {slot for slots in section.states.values() for slot in slots}
    return recognise(section.groups, slots, options.optimizer)


def _lacks(kind: str, slots: Mapping[str, Any]) -> bool:
    return any(slots.get(slot) is None for slot in OPTIMIZERS[kind].slots)


def check_settings(kind: str, group: Mapping[str, Any]) -> None:
    """Raise on settings of a group that are not numbers."""
    spec = OPTIMIZERS[kind]
    for key in (*spec.settings, *SCHEDULED):
        value = group.get(key)
        if key == "betas":
            pair = value if isinstance(value, (list, tuple)) else ()
            is_right = len(pair) == 2 and all(map(is_number, pair))
            need(is_right, key, "two numbers", value)
        elif value is not None or key in spec.settings:
            need(is_number(value), key, "a number", value)
    if spec.decay_is_per_rate:
        need(bool(_first_rate(group)), "the first learning rate", "above 0", 0)


def _set_steps(
    groups: Sequence[TorchGroup],
    sections: Sequence[OptimizerSection],
    default: int,
) -> None:
    """Read the step count of each group; MLX keeps one for all its parameters."""
    known: list[int | None] = []
    for group in groups:
        counts: dict[int, str] = {}
        for index, name in zip(group.indices, group.names, strict=True):
            step = sections[group.section].slots(index).get("step")
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
    plan: OptimizerPlan,
    sections: Sequence[OptimizerSection],
    torch_only: list[str],
    options: Options,
) -> list[str]:
    notes = []
    if torch_only:
        notes.append(
            f"The optimizer state of {list_some(torch_only)} goes back unchanged, as "
            "the MLX model has no such parameters."
        )
    fresh = [
        name
        for g in plan.groups
        for index, name in zip(g.indices, g.names, strict=True)
        if OPTIMIZERS[g.kind].has_step
        and g.step
        and _lacks(g.kind, sections[g.section].slots(index))
    ]
    if fresh:
        notes.append(
            f"{list_some(fresh, 3)} had no optimizer state in PyTorch, as frozen "
            "parameters have: freeze them in the MLX model, too, before loading. If "
            "they are trained, they start with zero moments, and with the step count "
            "of the rest."
        )
    kinds = {g.kind for g in plan.groups if not OPTIMIZERS[g.kind].has_step}
    if kinds and options.step is None:
        said = " and ".join(sorted(kinds))
        notes.append(f"{said} keeps no step count: MLX's starts at 0 (--step).")
    if any("max_momentum" in s for section in sections for s in section.groups):
        notes.append(  # OneCycleLR's and CyclicLR's
            "PyTorch's schedule moves the momentum (or betas[0]) as well: in MLX it "
            "stays as it is now, unless you set it before each step."
        )
    return notes


def to_mlx(
    plan: OptimizerPlan,
    sections: Sequence[OptimizerSection],
    entries: Mapping[str, Entry],
    tensors: Mapping[str, mx.array],
) -> dict[str, mx.array]:
    """Return the flat MLX state; parameters without one get zeros."""
    flat: dict[str, mx.array] = {}
    for i, group in enumerate(plan.groups):
        section, prefix = sections[group.section], plan.prefix(i)
        settings = section.groups[group.number]
        flat[f"{prefix}step"] = mx.array(group.step, mx.uint64)
        flat[f"{prefix}learning_rate"] = mx.array(number(settings["lr"]), mx.float32)
        for index, name in zip(group.indices, group.names, strict=True):
            slots, like = section.slots(index), tensors[name]
            for theirs, ours in OPTIMIZERS[group.kind].slots.items():
                moment = slots.get(theirs)
                moment = mx.zeros_like(like) if moment is None else moment
                need(
                    isinstance(moment, mx.array),
                    f"{theirs} of {name}",
                    "a tensor",
                    moment,
                )
                if moment.shape != like.shape:
                    raise ConvertError(
                        f"{theirs} of {name} has shape {moment.shape}, the parameter "
                        f"{like.shape}: the names are in another order. Give them with "
                        "names=... (--names)."
                    )
                for mlx_name, array in entries[name].to_mlx(moment).items():
                    flat[f"{prefix}{mlx_name}.{ours}"] = array
    return flat


def to_torch(
    plan: OptimizerPlan,
    sections: Sequence[OptimizerSection],
    entries: Mapping[str, Entry],
    flat: Mapping[str, mx.array],
    settings: Sequence[Mapping[str, Any]],
    accept: Iterable[str] = (),
) -> tuple[list[Write], list[str]]:
    """Return the writes that bring PyTorch's state dicts to where MLX is, and notes.

    ``flat`` is ``tree_flatten(optimizer.state)`` as a dict, ``settings`` are those of
    each MLX optimizer (:func:`mlx_settings`).
    """
    _check_parts(plan, settings)
    writes: list[Write] = []
    found: list[Difference] = []
    rates: list[str] = []
    for i, group in enumerate(plan.groups):
        section, prefix = sections[group.section], plan.prefix(i)
        used = settings[0 if plan.is_single else i]
        step = _step_count(flat, f"{prefix}step")
        found += mlx_differences(group.kind, used, step)
        changed = _changed_settings(group, section, flat, prefix, used)
        for key, value in changed.items():
            writes += section.write_setting(group.number, key, value)
        if used.get("has_schedule"):
            now = section.groups[group.number] | changed
            rates.append(f"{number(now['lr']):.6g}")
        for index, name in zip(group.indices, group.names, strict=True):
            slots = _torch_slots(group, section, index, entries[name], flat, prefix)
            if slots and OPTIMIZERS[group.kind].has_step:
                like = _step_example(section, index)
                slots = {"step": _step_like(like, step), **slots}
            writes += section.write_state(index, slots) if slots else []
    notes = check_differences(found, accept)
    if rates:
        notes.append(
            "MLX's learning rate schedule is not converted: PyTorch gets its rate for "
            f"the next step, {', '.join(dict.fromkeys(rates))}."
        )
    return writes, notes


def _check_parts(plan: OptimizerPlan, settings: Sequence[Any]) -> None:
    wanted = 1 if plan.is_single else len(plan.groups)
    if len(settings) != wanted:
        raise ConvertError(
            f"The MLX optimizer has {len(settings)} parts, and PyTorch's "
            f"{len(plan.groups)} parameter groups need "
            f"{'one optimizer' if wanted == 1 else f'a MultiOptimizer of {wanted}'}."
        )


def _step_count(flat: Mapping[str, Any], key: str) -> int:
    step = float(number(_required(flat, key)))
    if not 0 <= step < 2**53:
        raise ConvertError(f"The MLX optimizer's {key} is {step}, which is no count.")
    return int(step)


def _required(flat: Mapping[str, Any], key: str) -> Any:
    if key not in flat:
        raise ConvertError(
            f"The MLX optimizer state has no {key!r}: call optimizer.init(model."
            "trainable_parameters()) or make a step first."
        )
    return flat[key]


def _torch_slots(
    group: TorchGroup,
    section: OptimizerSection,
    index: Index,
    entry: Entry,
    flat: Mapping[str, mx.array],
    prefix: str,
) -> dict[str, Any]:
    """Return the slots to write; none where PyTorch's are right as they are."""
    spec, old = OPTIMIZERS[group.kind], section.slots(index)
    held = {
        theirs: {
            n: flat[f"{prefix}{n}.{ours}"]
            for n in entry.mlx
            if f"{prefix}{n}.{ours}" in flat
        }
        for theirs, ours in spec.slots.items()
    }
    if not any(held.values()):  # frozen in MLX
        if any(
            old.get(s) is not None and not isinstance(old[s], mx.array)
            for s in spec.slots
        ):
            raise ConvertError(
                f"{entry.mlx[0]} has no state in the MLX optimizer, and had one when "
                "it was loaded: give the optimizer that was trained."
            )
        return {}
    for slot, arrays in held.items():
        missing = [n for n in entry.mlx if n not in arrays]
        if missing:
            _required(flat, f"{prefix}{missing[0]}.{spec.slots[slot]}")
    slots = {slot: entry.to_torch(arrays) for slot, arrays in held.items()}
    if _lacks(group.kind, old):
        # PyTorch starts a missing momentum buffer with the undampened gradient, MLX
        # with the dampened one: written as zeros, they agree.
        settings = section.groups[group.number]
        is_dampened = number(settings.get("dampening", 0))
        moved = spec.has_step and _step_count(flat, f"{prefix}step") != group.step
        is_zero = not any(mx.any(x).item() for x in slots.values())
        if is_zero and not moved and not is_dampened:
            return {}
    return {slot: as_leaf(x, old.get(slot)) for slot, x in slots.items()}


def _step_example(section: OptimizerSection, index: Index) -> Any:
    own = section.slots(index).get("step")
    if own is not None:
        return own
    others = (slots.get("step") for slots in section.states.values())
    return next((step for step in others if step is not None), mx.array(0.0))


def _step_like(like: Any, step: int) -> Any:
    """Return a step count as PyTorch wrote them: a number, or an array of one."""
    if isinstance(like, mx.array):
        return mx.full(like.shape, step, like.dtype)
    return float(step) if type(like) is float else step


def _changed_settings(
    group: TorchGroup,
    section: OptimizerSection,
    flat: Mapping[str, mx.array],
    prefix: str,
    used: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the settings that are no longer PyTorch's, in PyTorch's types."""
    spec, settings = OPTIMIZERS[group.kind], section.groups[group.number]
    expected = constructor_args(group.kind, settings)
    changed = {}
    for theirs, ours in spec.settings.items():
        if theirs == "lr" or ours not in used or used[ours] == expected[ours]:
            continue
        value, old = used[ours], settings[theirs]
        if theirs == "weight_decay" and spec.decay_is_per_rate:
            value *= _first_rate(settings)
        if isinstance(old, (list, tuple)):
            value = tuple(value) if isinstance(old, tuple) else list(value)
        changed[theirs] = mx.array(value, old.dtype) if _is_array(old) else value
    held = number(_required(flat, f"{prefix}learning_rate"))
    rate = _torch_rate(settings, used, held)
    if rate is not None:
        is_array = _is_array(settings["lr"])
        changed["lr"] = mx.array(rate, settings["lr"].dtype) if is_array else rate
    for key, (off, _) in spec.refused.items():  # what was accepted stays off
        value = plain_setting(settings.get(key))
        if key not in spec.settings and value not in (*off, None):
            is_number = isinstance(value, (bool, int, float))
            changed[key] = type(value)(off[0]) if is_number else off[0]
    return changed


def _is_array(value: Any) -> bool:
    return isinstance(value, mx.array)


def constructor_args(kind: str, group: Mapping[str, Any]) -> dict[str, Any]:
    """Return MLX constructor arguments that compute what a PyTorch group computes.

    Example:
        >>> constructor_args("Adam", {"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8})
        {'learning_rate': 0.1, 'betas': [0.9, 0.99], 'eps': 1e-08, \
'bias_correction': True}
    """
    spec = OPTIMIZERS[kind]
    out: dict[str, Any] = {}
    for theirs, ours in spec.settings.items():
        value = group[theirs]
        is_pair = isinstance(value, (tuple, list))
        out[ours] = [number(v) for v in value] if is_pair else number(value)
    if spec.decay_is_per_rate:
        out["weight_decay"] /= _first_rate(group)
    return out | spec.forced


def _first_rate(group: Mapping[str, Any]) -> float:
    return float(number(group.get("initial_lr") or group["lr"]))


def build(
    plan: OptimizerPlan,
    sections: Sequence[OptimizerSection],
    entries: Mapping[str, Entry],
    learning_rate: Rate | Sequence[Rate] | None = None,
) -> optim.Optimizer:
    """Build the MLX optimizer that continues where PyTorch's groups stopped.

    Where the groups differ, it is a ``MultiOptimizer``.
    """
    groups = plan.groups[:1] if plan.is_single else plan.groups
    held = [sections[g.section].groups[g.number] for g in groups]
    parts = []
    for group, own, rate in zip(groups, held, _rates(held, learning_rate), strict=True):
        arguments = constructor_args(group.kind, own)
        arguments["learning_rate"] = rate
        parts.append(OPTIMIZERS[group.kind].mlx(**arguments))
    if len(parts) == 1:
        return parts[0]
    members = [frozenset(n for t in g.names for n in entries[t].mlx) for g in groups]
    filters = [lambda path, _, own=own: path in own for own in members[:-1]]
    return optim.MultiOptimizer(parts, filters)


def _rates(
    groups: Sequence[Mapping[str, Any]], given: Rate | Sequence[Rate] | None
) -> list[Rate]:
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
        return [_checked_rate(rate) for rate in given]
    # In a warmup's first step all rates are 0, and only these tell the groups apart.
    first: list[Rate] = [_first_rate(group) for group in groups]
    for rates in (own, first):
        if len(set(rates)) > 1:
            raise ValueError(
                f"The parameter groups have different learning rates ({rates}): give "
                "learning_rate as a list, a number or schedule for each in this order."
            )
    return [_checked_rate(given)] * len(groups)


def _checked_rate(rate: Any) -> Any:
    first = rate(mx.array(0, mx.uint64)) if callable(rate) else rate
    is_right = (
        isinstance(first, mx.array)
        if callable(rate)
        else (isinstance(rate, (Real, mx.array)) and not isinstance(rate, bool))
    )
    if not is_right:
        raise TypeError(
            "learning_rate must be a number, or a function from the step count to an "
            f"mx.array; got {first!r}."
        )
    return rate


def _torch_rate(
    group: Mapping[str, Any], used: Mapping[str, Any], held: float
) -> float | None:
    """Return PyTorch's new rate; None while MLX's float32 one is its rounding.

    With a schedule, MLX's state holds the rate of the last step, PyTorch's groups that
    of the next one.
    """
    held = used.get("next_rate", held)
    # Not every bit: a schedule may have run on another device, or compiled.
    return None if math.isclose(number(group["lr"]), held, rel_tol=1e-6) else held


def mlx_settings(optimizer: optim.Optimizer) -> list[dict[str, Any]]:
    """Return class, settings and next rate of each single optimizer.

    Example:
        >>> mlx_settings(optim.Lion(0.1, betas=[0.8, 0.9]))[0]["betas"]
        [0.8, 0.9]
    """
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
        row["next_rate"] = number(mx.array(schedule(optimizer.step)))
    return [row]


def _signature(kind: str, group: Mapping[str, Any]) -> str:
    rest = [number(group.get(key)) for key in sorted(SCHEDULED)]
    return repr((kind, constructor_args(kind, group), rest))
