"""Whole checkpoints: a PyTorch checkpoint object <-> everything an MLX run needs."""

import warnings
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from .. import formats
from . import optimizers
from .flat_optimizer import flattened, is_flat, unflattened
from .foreign import foreign_notes, plain_part
from .layouts import Choices, Entry, Plan, make_plan
from .layouts.model_hints import model_notes
from .layouts.wrappers import LIGHTNING
from .optimizers import state as optimizer_state
from .optimizers.valid import check_state_dict
from .parameter_order import mlx_order, parameter_names
from .passthrough import age_notes, entries, schedules, steps_of
from .sections import cut, find_parts, get, moments_in, other_models, paste

LIGHTNING_VERSION = "pytorch-lightning_version"  # only Lightning's files have it


@dataclass
class Run:
    """A training run in MLX's terms.

    Attributes:
        weights: MLX's flat weights; None where there is no model.
        optimizer: ``tree_flatten(optimizer.state)`` as a dict, or None.
        scaler: a ``GradScaler.state_dict``, or None.
        record: all that only PyTorch knows, for the way back.
        notes: sentences for the user.
        runs: where the checkpoint holds several models, a run for each; then only
            ``record`` and ``notes`` are there beside it.
    """

    weights: dict[str, mx.array] | None = None
    optimizer: dict[str, mx.array] | None = None
    scaler: dict[str, Any] | None = None
    record: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    runs: dict[str, "Run"] = field(default_factory=dict)


@dataclass(frozen=True)
class Options:
    """What the user says about a checkpoint.

    Attributes:
        choices: names and layouts.
        keys: part -> its place (see ``sections.find_parts``).
        optimizer: the PyTorch optimizer's class name.
        accept: differences between the optimizers to convert in spite of.
        names: the parameters' PyTorch names in the optimizer's order.
        step: the step count, for optimizers that keep none.
        scaler_format: a key of :data:`mlx_gradscale.formats.FORMATS`.
    """

    choices: Choices = field(default_factory=Choices)
    keys: Mapping[str, str] = field(default_factory=dict)
    optimizer: str | None = None
    accept: tuple[str, ...] = ()
    names: tuple[str, ...] | None = None
    step: int | None = None
    scaler_format: str | None = None


def from_torch(
    checkpoint: Any, model: nn.Module | None = None, options: Options | None = None
) -> Run:
    """Converts a PyTorch checkpoint, as ``torch_checkpoint.load`` gives it.

    Args:
        checkpoint: a dict of any shape, or a bare state dict.
        model: the MLX model; gives names, layouts and shapes. It is not changed.
        options: what the checkpoint does not tell.

    Returns:
        Run: ready to be written or resumed. What MLX has no place for is in its
        ``record`` and comes back as it was: dropped tensors with their moments,
        averaged copies of the model (in PyTorch's layout, and not averaged further),
        schedules, counters, objects of other programs' classes.

    Example:
        >>> weight = mx.array([[1.0, 2.0]])
        >>> run = from_torch({"model": {"fc.weight": weight}, "epoch": 3})
        >>> list(run.weights), run.record["checkpoint"]["epoch"]
        (['fc.weight'], 3)
    """
    options = options or Options()
    parts = find_parts(checkpoint, options.keys)
    run = Run(record={"checkpoint": cut(checkpoint, parts)})
    if "model" in parts:
        tensors = plain_part("model", get(checkpoint, parts["model"]))
        is_lightning = LIGHTNING_VERSION in (
            checkpoint if isinstance(checkpoint, Mapping) else ()
        )
        prefix = LIGHTNING if is_lightning else ""
        plan = make_plan(tensors, model, options.choices, prefix)
        run.weights = plan.to_mlx(tensors)
        run.record["model"] = _model_record(tensors, plan)
        run.notes += _model_notes(plan) + _other_notes(checkpoint, parts)
        run.notes += model_notes(model) if model is not None else []
    if "optimizer" in parts:
        if "model" not in parts:
            raise ValueError(
                "The checkpoint holds an optimizer but no model: without the model's "
                "names its state cannot be converted. Name the model (--model-key), or "
                "leave the optimizer out (--optimizer-key '')."
            )
        found = plain_part("optimizer", get(checkpoint, parts["optimizer"]))
        state = unflattened(found)
        check_state_dict(state)
        # Before its parameters are sought: an optimizer that MLX has not is told so.
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
        run.optimizer = converted.flat
        run.record["optimizer"] = converted.record | _extra(state, parts)
        if is_flat(found):
            run.record["optimizer"]["flat"] = True
        run.notes += converted.notes + doubts
    if "scaler" in parts:
        state = plain_part("scaler", get(checkpoint, parts["scaler"]))
        _take_scaler(run, state, options.scaler_format)
    run.notes += foreign_notes(run.record["checkpoint"])
    run.notes += schedule_notes(run)
    return run


def to_torch(run: Run, accept: Iterable[str] = ()) -> tuple[Any, list[str]]:
    """Makes the PyTorch checkpoint of a run.

    Args:
        run: from :func:`from_torch`, or read from a folder, with newer values.
        accept: differences between the optimizers to convert in spite of.

    Returns:
        tuple: the checkpoint, of the same shape as the one the run came from, for
        ``torch_checkpoint.save``; and sentences for the user, on entries that are as
        old as the conversion (epoch, schedule), for example.

    Example:
        >>> start = {"model": {"fc.weight": mx.array([[1.0, 2.0]])}, "epoch": 3}
        >>> to_torch(from_torch(start))[0]["epoch"]
        3
    """
    record = run.record
    if run.runs:
        from .several import several_to_torch

        return several_to_torch(run, accept)
    if "checkpoint" not in record:
        raise ValueError(
            "The run does not say how its PyTorch checkpoint looks: give one of the "
            "same model as a pattern (--like)."
        )
    values: dict[str, Any] = {}
    notes: list[str] = []
    if "model" in record:
        if run.weights is None:
            raise ValueError("The run has no weights.")
        plan = plan_of(record)
        values["model"] = _state_dict(plan.to_torch(run.weights), record["model"])
        spare = set(run.weights) - {n for e in plan.entries.values() for n in e.mlx}
        if spare:
            raise ValueError(
                f"The MLX weights have {sorted(spare)}, which PyTorch's model has not."
            )
    if "scaler" in record and run.scaler is not None:
        values["scaler"], said = _give_scaler(run.scaler, record["scaler"]["format"])
        notes += said
    if "optimizer" in record and run.optimizer is not None:
        state, said = optimizer_state.to_torch(
            run.optimizer,
            record["optimizer"],
            plan.entries,
            used=record.get("used"),
            accept=accept,
        )
        state |= paste(record["optimizer"].get("extra", {}), values)
        is_flat_one = record["optimizer"].get("flat", False)
        values["optimizer"] = flattened(state) if is_flat_one else state
        notes += said
        notes += [
            f"PyTorch's {entry.torch} gets the optimizer state of "
            f"{' and '.join(entry.places[0])}, not of {' and '.join(other)}."
            for entry in plan.entries.values()
            for other in entry.places[1:]
        ]
    for part in ("optimizer", "scaler"):
        if part in record and part not in values:
            notes.append(f"The run has no {part} state: it is left out.")
        if part not in record and getattr(run, part) is not None:
            notes.append(f"PyTorch's checkpoint has no place for the {part} state.")
    notes += age_notes(record, run.optimizer)
    notes += [
        f"{place}: an optimizer's state that was not converted. It goes back as it "
        "was, beside newer weights: make a new optimizer in PyTorch."
        for place in moments_in(record["checkpoint"])
    ]
    return paste(record["checkpoint"], values), notes


def plan_of(record: Mapping[str, Any]) -> Plan:
    """The plan in a run's record."""
    model = record["model"]
    entries = {
        name: Entry(name, tuple(entry["mlx"]), entry["layout"])
        for name, entry in model["entries"].items()
    }
    return Plan(entries, dict(model["tied"]), tuple(model["aside"]))


def _model_record(tensors: Mapping[str, mx.array], plan: Plan) -> dict[str, Any]:
    return {
        "order": list(tensors),
        "entries": {
            name: {"mlx": list(entry.mlx), "layout": entry.layout}
            for name, entry in plan.entries.items()
        },
        "tied": plan.tied,
        "aside": {name: tensors[name] for name in plan.aside},
        "ordered": isinstance(tensors, OrderedDict),
        # torch.nn.Module.state_dict hangs the versions of its modules here.
        "metadata": getattr(tensors, "_metadata", None),
    }


def _state_dict(
    tensors: Mapping[str, mx.array], record: Mapping[str, Any]
) -> dict[str, mx.array]:
    both = {**tensors, **record["aside"]}
    out = OrderedDict((name, both[name]) for name in record["order"])
    if not record["ordered"]:
        return dict(out)
    if record["metadata"] is not None:
        out._metadata = record["metadata"]
    return out


def _model_notes(plan: Plan) -> list[str]:
    notes = []
    untied = {e.torch: e.places for e in plan.entries.values() if len(e.places) > 1}
    tied = {alias: name for alias, name in plan.tied.items() if name not in untied}
    if tied:
        said = ", ".join(f"{alias} = {name}" for alias, name in tied.items())
        notes.append(
            f"Tied weights are kept once: {said}. For an MLX model with a parameter of "
            "its own there, give the model (--model)."
        )
    for name, places in untied.items():
        said = " and ".join(", ".join(place) for place in places)
        notes.append(
            f"{name} is one tensor in PyTorch under several names, and {said} are "
            "different parameters in the MLX model: all get its values and its "
            "optimizer state, but they will train apart, and then there is no way "
            "back. To keep them tied, use one array in MLX (embedding.as_linear, say)."
        )
    if any(name.endswith(".lora_a") for e in plan.entries.values() for name in e.mlx):
        notes.append(
            "LoRA adapters of PEFT: mlx-lm multiplies them by the scale in its "
            "adapter_config.json, which must be PEFT's lora_alpha / r (by sqrt(r) with "
            "use_rslora)."
        )
    counters = [n for n in plan.aside if n.endswith("num_batches_tracked")]
    if counters:
        notes.append(
            f"{len(counters)} BatchNorm counters (num_batches_tracked) are kept for "
            "the way back; MLX has none, so they will not count its steps."
        )
    dropped = [n for n in plan.aside if n not in counters]
    if dropped:
        notes.append(f"Kept only for the way back: {', '.join(dropped)}.")
    return notes


def _other_notes(checkpoint: Any, parts: Mapping[str, Any]) -> list[str]:
    others = other_models(checkpoint, parts)
    if not others:
        return []
    taken = "/".join(map(str, parts["model"]))
    return [
        f"{taken} is taken for the model that was trained. {', '.join(others)}: also "
        "a model, kept for the way back as it is (--model-key takes another)."
    ]


def _extra(state: Mapping[str, Any], parts: Mapping[str, Any]) -> dict[str, Any]:
    """What an optimizer's dict holds besides its own two keys, without a scaler."""
    extra = {k: v for k, v in state.items() if k not in ("state", "param_groups")}
    start, scaler = parts["optimizer"], parts.get("scaler", ())
    if scaler[: len(start)] == start and len(scaler) > len(start):
        extra = cut(extra, {"scaler": scaler[len(start) :]})
    return {"extra": extra} if extra else {}


def _take_scaler(run: Run, state: Mapping[str, Any], format: str | None) -> None:
    format = format or formats.recognise(state)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", formats.FormatWarning)
        run.scaler = formats.read_state(state, format)
    run.record["scaler"] = {"format": format}
    run.notes += [str(warning.message) for warning in said]


def _give_scaler(state: dict[str, Any], format: str) -> tuple[Any, list[str]]:
    row = formats.FORMATS[format]
    if format == "torch":
        # PyTorch ignores keys it does not know, and the way back needs them.
        rules = ("backoff_interval", "dynamic", "min_scale", "max_scale")
        ignored = [key for key in rules if key in state]
        said = f"PyTorch's GradScaler ignores {', '.join(ignored)}."
        return dict(state), [said] if ignored else []
    target = format if row.writes and format != "flodl" else "torch"
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", formats.FormatWarning)
        out = formats.write_state(state, target)
    notes = [str(warning.message) for warning in said]
    if target != format:
        notes.append(
            f"The scaler state came from {format}; it is written as PyTorch's."
        )
    return out, notes


def schedule_notes(run: Run) -> list[str]:
    """A word on learning rate schedulers, which have no counterpart to convert to."""
    steps = steps_of(run.optimizer or {})
    at = f", the optimizer at step {steps[0]}" if steps else ""
    notes = [
        f"{name}: a PyTorch schedule (last_epoch {epoch}{at}) is kept for the way back "
        "and not run; in MLX give one of the optimizer's step, load_run(folder, model, "
        "learning_rate=lambda step: ...)."
        for name, epoch in schedules(entries(run.record["checkpoint"])).items()
    ]
    groups = run.record["optimizer"]["groups"] if "optimizer" in run.record else []
    if any("max_momentum" in group for group in groups):  # OneCycleLR's and CyclicLR's
        notes.append(
            "PyTorch's schedule moves the momentum (or betas[0]) too: in MLX it stays "
            "as it is now, unless you set the optimizer's before each step, in a step "
            "that is not compiled."
        )
    return notes
