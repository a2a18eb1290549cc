"""Write an MLX run as a PyTorch checkpoint by filling in a template."""

import os
import warnings
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.optimizers import Optimizer

from ..checkpoint import Checkpoint
from ..checkpoint.save import WRAPPERS, capture, find_scaler
from ..core.masters import join
from ..core.scale import TORCH_KEYS
from ..core.scaler import GradScaler
from ..files.text import list_some
from .folder import TRAINER, check_torch, trainer_state, write_torch
from .groups import flatten
from .names import is_adapter
from .optimizers import to_torch
from .options import Options
from .template import Template
from .template_file import read_template
from .tree import ConvertError, get, match_type, number, unchanged


def save_torch(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | None = None,
    scaler: GradScaler | None = None,
    *,
    like: Template | str | os.PathLike[str],
    options: Options | None = None,
    overwrite: bool = True,
) -> list[str]:
    """Write an MLX run as a PyTorch checkpoint with the structure of a template.

    Args:
        path (str): The file to write, or the folder if the template describes a folder.
        model (nn.Module): The model. Master weights are written in place of
            half-precision ones.
        optimizer (Optimizer, optional): The optimizer. For a ``LossScaleOptimizer``,
            the states of the inner optimizer and the scaler are written. If omitted,
            the checkpoint is written without optimizer state.
        scaler (GradScaler, optional): The scaler. Default: the scaler of a
            ``LossScaleOptimizer``; otherwise, the template's scaler state is kept.
        like (Template or str): The template from :func:`load_torch`, a PyTorch
            checkpoint of the same model, or a ``template.pt``. Entries without an MLX
            counterpart are copied from it, so update entries such as
            ``template["epoch"]`` first.
        options (Options, optional): Used if ``like`` is a PyTorch checkpoint. For a
            template, only ``accept`` and ``limits`` are allowed.
        overwrite (bool): Whether to replace an existing file or folder. Default:
            ``True``.

    Returns:
        list: Notes on differences, and on changed or omitted entries. A warning lists
        the entries that were copied from the template although the run has moved on.

    Raises:
        ConvertError: If the run does not match the template or cannot be converted.
        FileExistsError: If ``path`` exists and ``overwrite`` is False, or if it is a
            folder that contains other files.

    Example:
        >>> import tempfile
        >>> from mlx_gradscale import torch_checkpoint
        >>> from mlx_gradscale.convert import load_torch, save_torch
        >>> folder = tempfile.mkdtemp() + "/"
        >>> weights = {"weight": mx.ones((1, 2)), "bias": mx.zeros(1)}
        >>> torch_checkpoint.save(folder + "a.pt", {"model": weights, "epoch": 3})
        >>> model = nn.Linear(2, 1)
        >>> run = load_torch(folder + "a.pt", model)
        >>> model.weight *= 2
        >>> run.template["epoch"] = 4
        >>> save_torch(folder + "b.pt", model, like=run.template)
        []
        >>> torch_checkpoint.load(folder + "b.pt")["model"]["weight"]
        array([[2, 2]], dtype=float32)
    """
    options = options or Options()
    template = read_template(like, model, options)
    run = gather(model, optimizer, scaler)
    notes, old = write_run(path, template, run, options.accept, overwrite)
    for note in old:
        warnings.warn(note, stacklevel=2)
    return notes + old


def write_run(
    path: str | os.PathLike[str],
    template: Template,
    run: Checkpoint,
    accept: Collection[str] = (),
    overwrite: bool = False,
    dry_run: bool = False,
) -> tuple[list[str], list[str]]:
    """Write a template filled with a run; return notes, and notes on old entries."""
    path, files = Path(path), template.files
    check_torch(path, template.checkpoint, files, overwrite)
    with unchanged(template.checkpoint):
        notes, old = _fill(template, run, accept)
        gone = [name for name, file in (files or {}).items() if not file.is_file()]
        if files and gone:
            files = {name: file for name, file in files.items() if name not in gone}
            notes.append(f"These files no longer exist: {list_some(gone)}.")
        if not dry_run:
            write_torch(path, template.checkpoint, files)
    return notes, old


def gather(
    model: nn.Module,
    optimizer: Optimizer | None = None,
    scaler: GradScaler | None = None,
) -> Checkpoint:
    """Return a live run in the form that :func:`unwrap` returns."""
    optimizer = optimizer or Optimizer()
    return unwrap(capture(model, optimizer, find_scaler(optimizer, scaler)))


def unwrap(saved: Checkpoint) -> Checkpoint:
    """Return a checkpoint with master weights in place of half-precision ones.

    For a wrapped optimizer, the state and settings are the inner optimizer's.
    """
    weights, state = dict(saved.weights), saved.optimizer
    settings = saved.description["settings"]
    if settings and settings[0]["class"] in WRAPPERS:
        state, settings = {}, settings[1:]
        for name, x in saved.optimizer.items():
            kind, _, path = name.partition(".")
            if kind == "masters":
                weights[path] = x
            elif kind == "remainders":
                weights[path] = join(saved.weights[path], x).master
            elif kind == "optimizer":
                state[path] = x
    # The base class stands for no optimizer.
    if [row["class"] for row in settings] == ["Optimizer"]:
        state, settings = {}, []
    scaler = saved.scaler
    if scaler:
        checked = GradScaler()  # raises if the file has invalid values
        checked.load_state_dict(scaler)
        scaler = checked.state_dict()
    description = saved.description | {"settings": settings}
    return Checkpoint(weights, state, scaler, saved.extra, description)


def _fill(
    template: Template, run: Checkpoint, accept: Collection[str]
) -> tuple[list[str], list[str]]:
    """Fill a template with a run; return notes, and notes on old entries."""
    _fill_model(template, run.weights)
    notes: list[str] = []
    new: list[int] = []  # the optimizers' steps
    sections, settings = template.sections, run.description["settings"]
    if sections.optimizers and not settings:
        for path in reversed(sections.optimizers):
            parent = get(template.checkpoint, path[:-1])
            if isinstance(parent, tuple):
                raise ConvertError(
                    "The run has no optimizer, and the template's optimizer state "
                    "cannot be removed from its tuple. Pass the optimizer."
                )
            del parent[path[-1]]
        notes.append("The run has no optimizer, so no optimizer state is written.")
    elif template.groups:
        notes += to_torch(template.groups, template.tensors(), run, accept)
        new = [int(number(run.optimizer[f"{g.prefix}step"])) for g in template.groups]
    elif settings:
        notes.append(
            "The MLX optimizer's state is not written: the template has no optimizer "
            "state, or keys={'optimizer': ''} (--optimizer-key '') omits it."
        )
    if run.scaler and sections.scaler is not None:
        held = get(template.checkpoint, sections.scaler)
        held |= run.scaler
        own = [key for key in run.scaler if key not in TORCH_KEYS]
        if own:
            notes.append(f"PyTorch's GradScaler ignores {', '.join(own)}.")
    elif run.scaler:
        notes.append(
            "The MLX scaler's state is not written: the template has no scaler state, "
            "or keys={'scaler': ''} (--scaler-key '') omits it."
        )
    for group in template.groups:
        flatten(group.held)
    old = [group.step for group in template.groups]
    moved = _move_trainer(template.checkpoint, old, new)
    if moved:
        changes = ", ".join(moved.values())
        notes.append(f"Changed to match the optimizer's step: {changes}.")
    return notes, _copied_notes(template, {*moved} | template.updated, old, new)


def _fill_model(template: Template, weights: Mapping[str, mx.array]) -> None:
    entries = template.plan.entries
    held = get(template.checkpoint, template.sections.model)
    placed = {name for entry in entries.values() for name in entry.mlx}
    wrong = sorted(placed - weights.keys())
    if not is_adapter([name for name in held if isinstance(name, str)]):
        wrong += sorted(weights.keys() - placed)  # adapters lack the base model
    wrong = wrong or [
        name
        for name, entry in entries.items()
        if entry.mlx_shapes(tuple(held[name].shape))
        != [weights[n].shape for n in entry.mlx]
    ]
    if wrong:
        raise ConvertError(
            f"The MLX model and the template's model differ in {list_some(wrong)}. As "
            "the template, use a PyTorch checkpoint of the same model."
        )
    for name, entry in entries.items():
        tensor, leaf = entry.to_torch(weights), held[name]
        # If MLX only rounded the template's tensor, keep that tensor.
        if not isinstance(leaf, mx.array) or not mx.array_equal(
            leaf.astype(tensor.dtype, stream=mx.cpu), tensor, equal_nan=True
        ):
            held[name] = match_type(tensor, leaf)
    for alias, name in template.plan.tied.items():
        held[alias] = held[name]


def _move_trainer(checkpoint: Any, old: list[int], new: list[int]) -> dict[str, str]:
    """Advance a Trainer's ``global_step``, ``epoch`` and schedule with the optimizer.

    ``train(resume_from_checkpoint=...)`` resumes from them. They change only if the
    template's ``global_step`` equals its optimizer's step count. The two differ after
    skipped steps, or if the user has set ``global_step``. Return the changes by file.
    """
    state = trainer_state(checkpoint)
    was = state.get("global_step")
    if type(was) is not int or {*old} != {was} or len({*new}) != 1 or new[0] == was:
        return {}
    now = new[0]
    moved: list[tuple[str, str, Any]] = [(TRAINER, "global_step", now)]
    if type(state.get("epoch")) in (int, float) and was > 0:
        moved.append((TRAINER, "epoch", state["epoch"] * now / was))
    for name, content in checkpoint.items():
        is_schedule = "scheduler" in str(name) and isinstance(content, dict)
        if is_schedule and content.get("last_epoch") == was:
            moved.append((name, "last_epoch", now))
            if type(content.get("_step_count")) is int:
                moved.append((name, "_step_count", content["_step_count"] + now - was))
    shown: dict[str, str] = {}
    for name, key, value in moved:
        text = f"{key} from {checkpoint[name][key]:g} to {value:g}"
        shown[name] = f"{shown[name]}, {text}" if name in shown else text
        checkpoint[name][key] = value
    return shown


def _copied_notes(
    template: Template, updated: Collection[str], old: list[int], new: list[int]
) -> list[str]:
    """Return a note on entries that were copied although the optimizer has moved on."""
    if not old or not new or max(old) == max(new):
        return []
    names = [name for name in template.entries_beside() if name not in updated]
    # These files hold random states and data positions.
    names += [n for n in template.files or () if n.endswith((".pkl", ".pth"))]
    return [
        "The optimizer has taken steps in MLX, but these entries are copied from the "
        f"template: {list_some(names)}. If any of them count steps, set them in the "
        "template before saving, or in PyTorch after loading. For a schedule, set its "
        "last_epoch; scheduler.step() would also change the learning rate."
    ][: len(names)]
