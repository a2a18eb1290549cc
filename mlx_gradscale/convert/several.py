"""Several models in one checkpoint (a GAN's), as several runs."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import mlx.nn as nn

from ..files.paths import check_name
from .conversion import Options, Run, from_torch, schedule_notes, to_torch
from .passthrough import age_notes
from .sections import PartsError, cut, find_parts, get, moments_in, paste


def is_several(options: Options) -> bool:
    """Whether the user names more than one model.

    Example:
        >>> is_several(Options(keys={"model": "generator,discriminator"}))
        True
    """
    return "," in options.keys.get("model", "")


def from_several(
    checkpoint: Any,
    models: Sequence[nn.Module | None] = (),
    options: Options | None = None,
) -> Run:
    """Converts several models of one PyTorch checkpoint together.

    Args:
        checkpoint: as for :func:`~mlx_gradscale.convert.from_torch`.
        models: the MLX models in the order of the keys; none, or one for each.
        options: its ``keys`` hold several places with commas between them, as many
            optimizers as models. A scaler goes with the first.

    Returns:
        Run: ``runs`` holds one for each model, by the last word of its key. The
        record holds what is in none of them.

    Example:
        >>> import mlx.core as mx
        >>> checkpoint = {"a": {"w": mx.ones(2)}, "b": {"w": mx.zeros(2)}, "epoch": 3}
        >>> run = from_several(checkpoint, options=Options(keys={"model": "a,b"}))
        >>> list(run.runs), run.record["checkpoint"]["epoch"]
        (['a', 'b'], 3)
    """
    options = options or Options()
    places = _places(options)
    if models and len(models) != len(places):
        raise ValueError(
            f"{len(places)} models are named (--model-key) and {len(models)} given "
            "(--model)."
        )
    if options.names is not None:
        raise ValueError("--names is for one optimizer: convert them one by one.")
    runs: dict[str, Run] = {}
    taken = {}
    for i, (name, keys) in enumerate(places.items()):
        parts = find_parts(checkpoint, keys)
        taken |= {f"{i}/{part}": path for part, path in parts.items()}
        own = {part: get(checkpoint, path) for part, path in parts.items()}
        alone = replace(options, keys={part: part for part in own})
        runs[name] = from_torch(own, models[i] if models else None, alone)
    skeleton = cut(checkpoint, taken)
    several = Run(record={"checkpoint": skeleton, "several": list(runs)}, runs=runs)
    several.notes = [
        f"{name}: {note}" for name, run in runs.items() for note in run.notes
    ]
    first = next(iter(runs.values()))
    several.notes += schedule_notes(replace(first, record=several.record))
    return several


def several_to_torch(run: Run, accept: Iterable[str] = ()) -> tuple[Any, list[str]]:
    """Makes the one PyTorch checkpoint of several runs; see ``to_torch``."""
    values: dict[str, Any] = {}
    notes: list[str] = []
    for i, (name, each) in enumerate(run.runs.items()):
        made, said = to_torch(each, accept)
        if not isinstance(made, dict):
            raise ValueError(f"The run {name} is not one of several.")
        values |= {f"{i}/{part}": value for part, value in made.items()}
        notes += [f"{name}: {note}" for note in said]
    first = next(iter(run.runs.values()))
    notes += age_notes(
        {**first.record, "checkpoint": run.record["checkpoint"]}, first.optimizer
    )
    notes += [
        f"{place}: an optimizer's state that was not converted; it goes back as it was."
        for place in moments_in(run.record["checkpoint"])
    ]
    return paste(run.record["checkpoint"], values), notes


def _places(options: Options) -> dict[str, dict[str, str]]:
    """The keys of each model and its optimizer, by the name of the run."""
    given = {part: key.split(",") for part, key in options.keys.items()}
    models = given["model"]
    for part in ("optimizer", "scaler"):
        if part in given and given[part] != [""] and len(given[part]) > len(models):
            raise PartsError(f"--{part}-key names more than --model-key.")
    if len(given.get("optimizer", models)) not in (1, len(models)):
        raise PartsError(
            "--optimizer-key names not as many as --model-key: give them in the same "
            "order, with commas between them."
        )
    rows = []
    for i, key in enumerate(models):
        row = {"model": key}
        for part in given.keys() - {"model"}:
            row[part] = given[part][i] if i < len(given[part]) else ""
        # One scaler that is found by itself goes with the first.
        rows.append(row if i == 0 else {"scaler": "", **row})
    names = [key.rpartition("/")[2] for key in models]
    if len(set(names)) != len(names):
        names = [key.replace("/", "-") for key in models]
    if len(set(names)) != len(names):
        raise PartsError(f"--model-key {options.keys['model']}: one comes twice.")
    return {
        check_name(name, "--model-key"): row
        for name, row in zip(names, rows, strict=True)
    }
