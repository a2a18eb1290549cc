"""A PyTorch checkpoint object <-> everything an MLX run needs."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn

from .. import formats
from . import optimizers
from .flat_optimizer import flattened, is_flat, unflattened
from .foreign import foreign_notes, plain_section
from .layouts import Plan, make_plan
from .layouts.model_hints import model_notes
from .layouts.wrappers import LIGHTNING
from .notes import moments_notes, other_notes, plan_notes, schedule_notes
from .optimizers import state as optimizer_state
from .optimizers.compare import check_accepted
from .optimizers.record import OptimizerRecord
from .optimizers.valid import check_state_dict
from .parameter_order import mlx_order, parameter_names
from .passthrough import age_notes
from .record import ModelRecord, Record
from .run import Options, Run
from .scaler_section import from_scaler, to_scaler
from .sections import find_sections
from .skeleton import Path, cut, get, paste

LIGHTNING_VERSION = "pytorch-lightning_version"  # only Lightning's files have it


def from_torch(
    checkpoint: Any, model: nn.Module | None = None, options: Options | None = None
) -> Run:
    """Convert a PyTorch checkpoint, as ``torch_checkpoint.load`` gives it.

    Args:
        checkpoint (Any): A dict of any shape, or a bare state dict.
        model (nn.Module, optional): The MLX model; gives names, layouts and shapes. It
            is not changed.
        options (Options, optional): What the checkpoint does not tell.

    Returns:
        Run: Ready to be written or resumed. What MLX has no place for is in its
        ``record`` and comes back as it was: dropped tensors with their moments,
        averaged copies of the model (in PyTorch's layout, and not averaged further),
        schedules, counters, objects of other programs' classes.

    Example:
        >>> weight = mx.array([[1.0, 2.0]])
        >>> run = from_torch({"model": {"fc.weight": weight}, "epoch": 3})
        >>> list(run.weights), run.record.checkpoint["epoch"]
        (['fc.weight'], 3)
    """
    options = options or Options()
    sections = find_sections(checkpoint, options.keys)
    groups = ()
    if "optimizer" in sections:
        groups = unflattened(get(checkpoint, sections["optimizer"]))["param_groups"]
    check_accepted(options.accept, groups)
    return from_sections(checkpoint, sections, model, options)


def from_sections(
    checkpoint: Any,
    sections: Mapping[str, Path],
    model: nn.Module | None,
    options: Options,
) -> Run:
    """Convert a checkpoint whose sections were found; see :func:`from_torch`."""
    run = Run(record=Record(cut(checkpoint, sections)))
    if "model" in sections:
        tensors = plain_section("model", get(checkpoint, sections["model"]))
        held = checkpoint if isinstance(checkpoint, Mapping) else ()
        prefix = LIGHTNING if LIGHTNING_VERSION in held else ""
        plan = make_plan(tensors, model, options.choices, prefix)
        run.weights = plan.to_mlx(tensors)
        run.record.model = ModelRecord.of(tensors, plan)
        run.notes += plan_notes(plan) + other_notes(checkpoint, sections)
        run.notes += model_notes(model) if model is not None else []
    if "optimizer" in sections:
        if "model" not in sections:
            raise ValueError(
                "The checkpoint holds an optimizer but no model: without the model's "
                "names its state cannot be converted. Name the model (--model-key), or "
                "leave the optimizer out (--optimizer-key '')."
            )
        _convert_optimizer(run, checkpoint, sections, tensors, plan, model, options)
    if "scaler" in sections:
        state = plain_section("scaler", get(checkpoint, sections["scaler"]))
        run.record.scaler_format = options.scaler_format or formats.recognise(state)
        run.scaler, said = to_scaler(state, run.record.scaler_format)
        run.notes += said
    run.notes += foreign_notes(run.record.checkpoint)
    run.notes += schedule_notes(run)
    return run


def _convert_optimizer(
    run: Run,
    checkpoint: Any,
    sections: Mapping[str, Path],
    tensors: Mapping[str, mx.array],
    plan: Plan,
    model: nn.Module | None,
    options: Options,
) -> None:
    found = plain_section("optimizer", get(checkpoint, sections["optimizer"]))
    state = unflattened(found)
    check_state_dict(state)
    # Before its parameters are looked for: one that MLX does not have is refused here.
    optimizers.recognise(state, options.optimizer)
    names, doubts = parameter_names(
        state,
        tensors,
        plan,
        options.names,
        options.choices.named,
        mlx_order(tensors, plan, model),
    )
    converted = optimizer_state.to_mlx(
        state,
        names,
        plan.entries,
        tensors,
        optimizer=options.optimizer,
        accept=options.accept,
        step=options.step,
    )
    run.optimizer, run.record.optimizer = converted.flat, converted.record
    run.record.optimizer.extra = _extra(state, sections)
    run.record.optimizer.flat = is_flat(found)
    run.notes += converted.notes + doubts


def _extra(state: Mapping[str, Any], sections: Mapping[str, Path]) -> dict[str, Any]:
    """Return what an optimizer's dict holds besides its two keys and a scaler."""
    extra = {k: v for k, v in state.items() if k not in ("state", "param_groups")}
    start, scaler = sections["optimizer"], sections.get("scaler", ())
    if scaler[: len(start)] == start and len(scaler) > len(start):
        extra = cut(extra, {"scaler": scaler[len(start) :]})
    return extra


def to_torch(run: Run, accept: Iterable[str] = ()) -> tuple[Any, list[str]]:
    """Make the PyTorch checkpoint of a run.

    Args:
        run (Run): From :func:`from_torch`, or read from a folder, with newer values.
        accept (Iterable): Differences between the optimizers to convert in spite of.

    Returns:
        tuple: The checkpoint, of the same shape as the one the run came from, for
        ``torch_checkpoint.save``; and sentences for the user, on entries that are as
        old as the conversion (epoch, schedule), for example.

    Example:
        >>> start = {"model": {"fc.weight": mx.array([[1.0, 2.0]])}, "epoch": 3}
        >>> to_torch(from_torch(start))[0]["epoch"]
        3
    """
    if run.runs:
        return _several_to_torch(run, accept)
    record = run.record
    check_accepted(accept, record.optimizer.groups if record.optimizer else ())
    if record.checkpoint is None:
        raise ValueError(
            "The run does not say how its PyTorch checkpoint looks: give one of the "
            "same model as a pattern (--like)."
        )
    values: dict[str, Any] = {}
    notes: list[str] = []
    if record.model:
        values["model"] = _torch_model(run)
    if record.scaler_format and run.scaler is not None:
        values["scaler"], said = from_scaler(run.scaler, record.scaler_format)
        notes += said
    if record.optimizer and run.optimizer is not None:
        values["optimizer"], said = _torch_optimizer(run, values, accept)
        notes += said
    recorded = {"optimizer": record.optimizer, "scaler": record.scaler_format}
    for section, had in recorded.items():
        if had and section not in values:
            notes.append(f"The run has no {section} state: it is left out.")
        if not had and getattr(run, section) is not None:
            notes.append(f"PyTorch's checkpoint has no place for the {section} state.")
    notes += age_notes(record, run.optimizer) + moments_notes(record.checkpoint)
    return paste(record.checkpoint, values), notes


def _several_to_torch(run: Run, accept: Iterable[str] = ()) -> tuple[Any, list[str]]:
    """Return the one checkpoint of several runs."""
    values: dict[str, Any] = {}
    notes: list[str] = []
    for i, (name, each) in enumerate(run.runs.items()):
        made, said = to_torch(each, accept)
        if not isinstance(made, dict):
            raise ValueError(f"The run {name} is not one of several.")
        values |= {f"{i}/{section}": value for section, value in made.items()}
        notes += [f"{name}: {note}" for note in said]
    first = next(iter(run.runs.values()))
    skeleton = run.record.checkpoint
    notes += age_notes(replace(first.record, checkpoint=skeleton), first.optimizer)
    notes += moments_notes(skeleton)
    return paste(skeleton, values), notes


def _torch_model(run: Run) -> dict[str, mx.array]:
    if run.weights is None:
        raise ValueError("The run has no weights.")
    model = cast(ModelRecord, run.record.model)
    entries = model.entries.values()
    made = model.state_dict(run.weights)
    spare = set(run.weights) - {name for entry in entries for name in entry.mlx}
    if spare:
        raise ValueError(
            f"The MLX weights have {sorted(spare)}, PyTorch's model does not."
        )
    return made


def _torch_optimizer(
    run: Run, values: Mapping[str, Any], accept: Iterable[str]
) -> tuple[dict[str, Any], list[str]]:
    record = cast(OptimizerRecord, run.record.optimizer)
    entries = cast(ModelRecord, run.record.model).entries
    flat = cast(dict[str, mx.array], run.optimizer)
    state, notes = optimizer_state.to_torch(
        flat, record, entries, used=run.record.used, accept=accept
    )
    state |= paste(record.extra, values)
    notes += [
        f"PyTorch's {entry.torch} gets the optimizer state of "
        f"{' and '.join(entry.places[0])}, not of {' and '.join(other)}."
        for entry in entries.values()
        for other in entry.places[1:]
    ]
    return flattened(state) if record.flat else state, notes
