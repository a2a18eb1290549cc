"""Convert between PyTorch's parameter groups and MLX's flat optimizer state.

MLX's side is ``tree_flatten(optimizer.state)``: ``step``, ``learning_rate`` and
``<parameter>.<slot>``, each under ``states.<i>.`` for a ``MultiOptimizer``.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import mlx.core as mx
import mlx.optimizers as optim

from ..checkpoint import Checkpoint
from ..files.text import list_some
from ..torch_checkpoint import Tensor
from .files import ConvertError, match_type, number
from .groups import Group
from .layouts import Row
from .optimizer_table import (
    DECOUPLED,
    IGNORED,
    OFF,
    OPTIMIZERS,
    REFUSED,
    SCHEDULED,
    check_differences,
    differences,
    find_refused,
    plain_setting,
)

# A learning rate as in mlx.optimizers: a number, or a function of the step.
Rate = float | mx.array | Callable[[mx.array], mx.array]


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
        schedule = [number(group.settings.get(key)) for key in SCHEDULED]
        rules.append((group.kind, group.step, constructor_args(group), schedule))
    # Each group needs its own MLX optimizer if update rules, rates or steps differ.
    if any(rule != rules[0] for rule in rules):
        for i, group in enumerate(groups):
            group.prefix = f"states.{i}."


def check_groups(groups: Sequence[Group], accept: Collection[str]) -> list[str]:
    """Raise if MLX would update differently, unless accepted; return notes."""
    found: dict[str, str] = {}
    for group in groups:
        spec, settings = group.spec, group.settings
        found |= differences(spec, group.kind, settings)
        is_decayed = group.kind == "AdamW" and plain_setting(settings["weight_decay"])
        if is_decayed and settings.get(DECOUPLED) is not True:
            found[
                "The PyTorch version that saved the optimizer did not record whether "
                "it is AdamW, which MLX has, or Adam with weight decay, which differs."
            ] = DECOUPLED
        known = {*spec.settings, *spec.required, *spec.refused, *REFUSED, *IGNORED}
        found |= {
            f"The parameter groups have the key {key!r}, which {group.kind} does not "
            "have, so this may be a different optimizer.": key
            for key in settings
            if key not in known
        }
    notes = [group.spec.note for group in groups if group.spec.note]
    notes += check_differences(found, accept)
    fresh = [
        row.torch
        for group in groups
        # SGD without momentum has no state.
        if group.spec.has_step or number(group.settings.get("momentum", 1))
        for index, row in group.rows.items()
        if group.lacks_state(index)
    ]
    if fresh and any(not g.lacks_state(i) for g in groups for i in g.rows):
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
    groups: Sequence[Group],
    tensors: Mapping[str, Any],
    run: Checkpoint,
    accept: Collection[str],
) -> list[str]:
    """Write an MLX run's optimizer into PyTorch's groups, and return notes.

    New slots have the types of the parameters, ``tensors``.
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
    rates: dict[str, None] = {}
    for i, group in enumerate(groups):
        at = i if group.prefix else 0
        used, next_rate = settings[at], next_rates[at]
        if used["class"] != group.spec.mlx.__name__:
            raise ConvertError(
                f"The MLX optimizer is {used['class']}, but the original's optimizer "
                f"is {group.kind}. Pass a PyTorch checkpoint of a run with "
                f"{used['class']} as like= (--like)."
            )
        found |= differences(group.spec, f"MLX's {used['class']}", used["values"])
        step, rate = (
            float(run.optimizer[f"{group.prefix}{key}"])
            for key in ("step", "learning_rate")
        )
        if "learning_rate" in used["schedules"]:
            if next_rate is not None and math.isfinite(next_rate):
                rate = next_rate
                rates[f"{rate:.6g}"] = None
            else:
                found[
                    "The MLX run has a learning rate schedule, but its checkpoint "
                    f"contains only the rate of the last step, {rate:.6g}, and PyTorch "
                    "needs the next one. Restore the checkpoint in MLX with the "
                    "schedule, and save it again."
                ] = "learning_rate"
        _write_slots(group, tensors, run.optimizer, int(step))
        _write_settings(group, used["values"], rate)
        group.write()
    notes = check_differences(found, accept)
    if rates:
        notes.append(
            "MLX's learning rate schedule is not converted. The PyTorch checkpoint "
            f"contains its value for the next step: {', '.join(rates)}."
        )
    return notes


def _write_slots(
    group: Group, tensors: Mapping[str, Any], flat: Mapping[str, mx.array], step: int
) -> None:
    """Write the moments and steps of the parameters that are not frozen in MLX."""
    trained = set()
    for index, row in group.moments():
        if row.mlx[0] in flat:
            like = tensors[group.rows[index].torch]
            row.write(group.slots[index], row.torch, flat, like)
            trained.add(index)
    # PyTorch's version decides whether a step count is a number or an array.
    old = [x["step"] for x in group.slots.values() if x.get("step") is not None]
    like = old[0] if old else Tensor.of(mx.array(0.0))
    for index in trained if group.spec.has_step else ():
        if not group.lacks_state(index):
            group.slots[index]["step"] = match_type(step, like)


def _write_settings(group: Group, used: Mapping[str, Any], rate: float) -> None:
    """Write the settings that changed, in PyTorch's types."""
    settings, spec = group.settings, group.spec
    changed = {
        key: used[key]
        for key in spec.settings
        if key in used and used[key] != plain_setting(settings[key])
    }
    # MLX's learning rate is float32, and compiled schedules or other devices round
    # differently.
    if not math.isclose(number(settings["lr"]), rate, rel_tol=1e-6):
        changed["lr"] = rate
    # Turn off the settings that MLX ignored with the user's consent.
    changed |= {key: OFF.get(key, 0) for key in find_refused(spec, settings)}
    for key, value in changed.items():
        settings[key] = match_type(value, settings[key])


def constructor_args(group: Group) -> dict[str, Any]:
    """Return MLX constructor arguments equivalent to a PyTorch group's settings."""
    own = {key: plain_setting(group.settings[key]) for key in group.spec.settings}
    # An integer, as in torch.optim.SGD(params, lr=1), would be an int32 array in MLX.
    rate = float(number(group.settings["lr"]))
    return own | group.spec.forced | {"learning_rate": rate}


def build(groups: Sequence[Group], learning_rate: Any = None) -> optim.Optimizer:
    """Build the MLX optimizer, a ``MultiOptimizer`` if PyTorch's groups differ."""
    groups = groups if groups[0].prefix else groups[:1]
    parts = [(group.spec.mlx, constructor_args(group)) for group in groups]
    members = [{n for row in g.rows.values() for n in row.mlx} for g in groups]
    # In the first step of a warmup all rates are 0, and only initial_lr differs.
    first = [number(group.settings.get("initial_lr")) for group in groups]
    return _join(parts, members, learning_rate, first)


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
    parts, members, rates = [], [], []
    for i, row in enumerate(settings):
        prefix = f"states.{i}." if len(settings) > 1 else ""
        own = [key.removeprefix(prefix) for key in state if key.startswith(prefix)]
        members.append({key.rpartition(".")[0] for key in own})
        rates.append(float(state[f"{prefix}learning_rate"]))
        arguments = row["values"] | {"learning_rate": rates[i]}
        parts.append((classes[row["class"]], arguments))
    return _join(parts, members, learning_rate, rates)


def _join(
    parts: Sequence[tuple[type[optim.Optimizer], dict[str, Any]]],
    members: Sequence[Collection[str]],
    given: Any,
    first: Sequence[Any],
) -> optim.Optimizer:
    """Build an optimizer of each part, with the user's rates if any were given."""
    own = [arguments["learning_rate"] for _, arguments in parts]
    rates = own if given is None else given
    is_shared = len({*zip(own, first, strict=True)}) == 1
    if is_shared and not isinstance(rates, (list, tuple)):
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
        for (cls, arguments), rate in zip(parts, rates, strict=True)
    ]
    filters = [lambda path, _, own=own: path in own for own in members[:-1]]
    return made[0] if len(made) == 1 else optim.MultiOptimizer(made, filters)
