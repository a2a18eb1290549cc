"""Several models in one checkpoint (a GAN's), as several runs."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import mlx.nn as nn

from ..files.paths import check_name
from .conversion import from_sections
from .notes import schedule_notes
from .record import Record
from .run import Options, Run
from .sections import SectionsError, find_sections
from .skeleton import cut, get


def is_several(options: Options) -> bool:
    """Tell whether the user names more than one model.

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
    """Convert several models of one PyTorch checkpoint together.

    Args:
        checkpoint (Any): As for :func:`~mlx_gradscale.convert.from_torch`.
        models (list): The MLX models in the order of the keys; none, or one for
            each.
        options (Options, optional): Its ``keys`` hold several places with commas
            between them, as many optimizers as models. A scaler goes with the first.

    Returns:
        Run: ``runs`` holds one for each model, by the last word of its key. The
        record holds what is in none of them.

    Example:
        >>> import mlx.core as mx
        >>> checkpoint = {"a": {"w": mx.ones(2)}, "b": {"w": mx.zeros(2)}, "epoch": 3}
        >>> run = from_several(checkpoint, options=Options(keys={"model": "a,b"}))
        >>> list(run.runs), run.record.checkpoint["epoch"]
        (['a', 'b'], 3)
    """
    options = options or Options()
    named = _places(options)
    if models and len(models) != len(named):
        raise ValueError(
            f"{len(named)} models are named (--model-key) and {len(models)} given "
            "(--model)."
        )
    if options.names is not None:
        raise ValueError("--names is for one optimizer: convert them one by one.")
    runs: dict[str, Run] = {}
    taken: dict[str, Any] = {}
    for i, (name, keys) in enumerate(named.items()):
        sections = find_sections(checkpoint, keys)
        taken |= {f"{i}/{section}": path for section, path in sections.items()}
        own = {section: get(checkpoint, path) for section, path in sections.items()}
        places = {section: (section,) for section in own}
        model = models[i] if models else None
        runs[name] = from_sections(own, places, model, options)
    several = Run(record=Record(cut(checkpoint, taken)), runs=runs)
    several.notes = [
        f"{name}: {note}" for name, run in runs.items() for note in run.notes
    ]
    first = next(iter(runs.values()))
    several.notes += schedule_notes(replace(first, record=several.record))
    return several


def _places(options: Options) -> dict[str, dict[str, str]]:
    """Return the keys of each model and its optimizer, by the name of the run."""
    given = {section: key.split(",") for section, key in options.keys.items()}
    models = given["model"]
    for section in ("optimizer", "scaler"):
        keys = given.get(section, [""])
        if keys != [""] and len(keys) > len(models):
            raise SectionsError(f"--{section}-key names more than --model-key.")
    if len(given.get("optimizer", models)) not in (1, len(models)):
        raise SectionsError(
            "--optimizer-key names not as many as --model-key: give them in the same "
            "order, with commas between them."
        )
    rows = []
    for i, key in enumerate(models):
        row = {"model": key}
        for section in given.keys() - {"model"}:
            row[section] = given[section][i] if i < len(given[section]) else ""
        # One scaler that is found by itself goes with the first.
        rows.append(row if i == 0 else {"scaler": "", **row})
    names = [key.rpartition("/")[2] for key in models]
    if len(set(names)) != len(names):
        names = [key.replace("/", "-") for key in models]
    if len(set(names)) != len(names):
        raise SectionsError(f"--model-key {options.keys['model']}: one comes twice.")
    return {
        check_name(name, "--model-key"): row
        for name, row in zip(names, rows, strict=True)
    }
