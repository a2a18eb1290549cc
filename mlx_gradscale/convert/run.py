"""Load a PyTorch checkpoint into an MLX run, and write the run back onto it."""

import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.optimizers import Optimizer
from mlx.utils import tree_flatten, tree_map, tree_unflatten

from ..checkpoint import Checkpoint, read_checkpoint
from ..checkpoint.parts import WRAPPERS, capture, find_scaler
from ..core.masters import to_float32
from ..core.optimizer import LossScaleOptimizer, MasterWeightOptimizer
from ..core.scaler import GradScaler
from ..core.state import decode
from ..core.trees import get_at, restore, snapshot
from ..files.text import list_some
from ..torch_checkpoint import Tensor, read_all, replace_tensors
from .files import (
    ConvertError,
    Source,
    check_target,
    number,
    read_source,
    write_source,
)
from .layouts import Row
from .names import find_names
from .optimizers import (
    Group,
    Rate,
    build,
    check_groups,
    plan_groups,
    read_groups,
    rebuild,
    subtree,
    to_torch,
)
from .rows import Options, Table, is_adapter, make_table
from .sections import Keys, find_sections, list_others

# What reading a value of the wrong type raises.
_DAMAGE = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
_MOVED_ON = "The optimizer has taken steps in MLX"


@dataclass
class TorchRun:
    """The result of :func:`load_torch`.

    Attributes:
        optimizer (Optimizer, optional): The MLX optimizer, with PyTorch's settings and
            state. With ``loss_scaling`` it is wrapped in a ``LossScaleOptimizer``. None
            if no optimizer was loaded.
        scaler (GradScaler, optional): The scaler, with PyTorch's state. None if no
            scaler was loaded, unless ``loss_scaling`` creates a new one.
        notes (list): Notes on differences between PyTorch and MLX, and on entries that
            were not converted.
    """

    optimizer: Optimizer | None
    scaler: GradScaler | None
    notes: list[str] = field(default_factory=list)


@dataclass
class Plan:
    """Where each array of an MLX run belongs in a PyTorch checkpoint."""

    source: Source
    sections: dict[str, list[Keys]]
    tensors: dict[str, Any]  # the model's state dict
    table: Table
    others: list[str]  # paths of entries to copy
    notes: list[str]
    groups: list[Group] = field(default_factory=list)  # of all optimizers
    names: list[str] = field(default_factory=list)  # of the parameters in all groups
    scaler: GradScaler | None = None

    def places(self) -> Iterator[tuple[dict[Any, Any], Row, Tensor]]:
        """Yield the dict, the row and the parameter of each weight and moment.

        A row's PyTorch name is the tensor's key in the dict.
        """
        for name, row in self.table.rows.items():
            if name == row.torch:  # a tied tensor is converted once
                yield self.tensors, row, self.tensors[name]
        for group in self.groups:
            for index, row in group.moments():
                parameter = self.tensors[group.rows[index].torch]
                yield group.slots[index], row, parameter


def make_plan(
    source: Source,
    model: nn.Module | None,
    options: Options,
    rows: Mapping[str, Row] | None = None,
) -> Plan:
    """Find out how a checkpoint maps to a model, or to the given rows."""
    tree = source.tree
    sections = find_sections(tree, options.keys)
    held = get_at(sections["model"][0], tree)
    tensors = {name: x for name, x in held.items() if isinstance(x, Tensor)}
    if rows is not None:
        table = Table(dict(rows))
    elif model is not None:
        table = make_table(tensors, model, options)
    else:
        raise ConvertError(
            "The MLX model, which determines names, layouts and shapes, is missing. "
            "Pass it (--model)."
        )
    others, notes = list_others(tree, sections), source.notes + table.notes
    plan = Plan(source, sections, held, table, others, notes)
    try:
        _plan_state(plan, tensors, options)
    except ConvertError:
        raise
    except _DAMAGE as error:
        raise ConvertError(
            "The state of the optimizer or the scaler is damaged: "
            f"{type(error).__name__}: {error}. Save it again in PyTorch, or leave it "
            "out with keys={'optimizer': '', 'scaler': ''} (--optimizer-key '' "
            "--scaler-key '')."
        ) from error
    if others:
        notes.append(
            f"These entries are not converted: {list_some(others, 12)}. They are "
            "copied from the original on the way back. If one is a schedule, pass an "
            "MLX schedule as learning_rate= to load_torch() or build_optimizer()."
        )
    return plan


def _plan_state(plan: Plan, tensors: Mapping[str, Any], options: Options) -> None:
    """Plan the optimizers and the scaler."""
    source, sections, groups = plan.source, plan.sections, plan.groups
    for path in sections["optimizer"]:
        groups += read_groups(get_at(path, source.tree))
    if groups:
        # A safetensors file does not preserve PyTorch's order of tensors.
        is_ordered = not str([*sections["model"][0], ""][0]).endswith(".safetensors")
        rows = plan.table.rows
        plan.names, doubts = find_names(groups, tensors, rows, options, is_ordered)
        plan_groups(groups, plan.names, rows, source.trainer.get("global_step"))
        plan.notes += check_groups(groups, options.accept) + doubts
    for path in sections["scaler"]:
        plan.scaler, state = GradScaler(), get_at(path, source.tree)
        plan.scaler.load_state_dict({k: number(x) for k, x in state.items()})


def load_torch(
    path: str | os.PathLike[str],
    model: nn.Module,
    *,
    learning_rate: Rate | Sequence[Rate] | None = None,
    loss_scaling: bool = False,
    max_grad_norm: float | None = None,
    state_bits: int = 32,
    rename: Callable[[str], str] = str,
    layouts: Mapping[str, str] | None = None,
    drop: Collection[str] = (),
    keys: Mapping[str, str] | None = None,
    names: Collection[str] | None = None,
    accept: Collection[str] = (),
) -> TorchRun:
    """Load a PyTorch checkpoint into an MLX model and build its optimizer and scaler.

    Patterns are shell patterns (``features.*.weight``, ``*``) for PyTorch names.

    Args:
        path (str): A ``.pt`` or ``.safetensors`` file, or a folder saved by
            Accelerate or Transformers' Trainer.
        model (nn.Module): The model to load the weights into. Its names and shapes must
            match the checkpoint's, after conversion to MLX.
        learning_rate (float, Callable or list, optional): A number or a schedule, as
            for ``mlx.optimizers``, to replace the checkpoint's rate. If PyTorch's
            parameter groups have different rates, pass a list with one rate per group.
        loss_scaling (bool): Wrap the optimizer in a ``LossScaleOptimizer``. The weights
            are cast to the model's dtypes, and the original weights become the master
            weights, so call ``model.set_dtype(mx.float16)`` first. If False, the model
            takes the checkpoint's dtypes. Default: ``False``.
        max_grad_norm (float, optional): Passed to the ``LossScaleOptimizer``; ignored
            without ``loss_scaling``. Default: ``None``.
        state_bits (int): Passed to the ``LossScaleOptimizer``; ignored without
            ``loss_scaling``. Default: ``32``.
        rename (Callable): A function from PyTorch names to MLX names, such as
            ``lambda name: name.removeprefix("net.")``.
        layouts (dict, optional): Maps patterns to layouts: ``"conv"`` and
            ``"conv_transpose"`` for the weights of convolutions, ``"transpose"`` for
            weights that are (in, out) in PyTorch, and ``"same"`` for tensors to leave
            unchanged. The first matching pattern applies, but layouts that need more
            dimensions than the tensor has are skipped.
        drop (list): Patterns for tensors to ignore because the MLX model lacks them.
        keys (dict, optional): Maps ``"model"``, ``"optimizer"`` and ``"scaler"`` to
            their paths in the checkpoint, such as ``"optimizer_states/0"``. Separate
            the paths of several optimizers with commas. ``""`` omits the optimizer or
            the scaler.
        names (list, optional): The PyTorch names of the optimizer's parameters, in the
            order of its parameter groups or of ``model.named_parameters()``.
        accept (list): Names of optimizer settings to ignore although PyTorch and MLX
            differ in them. The error about a difference names the setting.

    Returns:
        TorchRun: The optimizer and the scaler. The optimizer computes the same updates
        as PyTorch's, except for rounding and accepted differences.

    Raises:
        ConvertError: If the checkpoint does not match the model or cannot be converted.
            The model is left unchanged.
        CheckpointError: If a file is damaged, hostile or unsupported.

    Example:
        >>> import tempfile
        >>> from mlx_gradscale import torch_checkpoint
        >>> tensors = {"weight": mx.ones((1, 2)), "bias": mx.zeros(1)}
        >>> path = tempfile.mkdtemp() + "/run.pt"
        >>> torch_checkpoint.save(path, {"model": tensors, "epoch": 3})
        >>> model = nn.Linear(2, 1)
        >>> run = load_torch(path, model)
        >>> model.weight
        array([[1, 1]], dtype=float32)
    """
    options = Options(rename, layouts or {}, drop, keys or {}, names, accept)
    plan = make_plan(read_source(path), model, options)
    wrapped = {"max_grad_norm": max_grad_norm, "state_bits": state_bits}
    return load(plan, model, learning_rate, wrapped if loss_scaling else None)


def load(
    plan: Plan,
    model: nn.Module,
    learning_rate: Any = None,
    wrapped: Mapping[str, Any] | None = None,
) -> TorchRun:
    """Load a planned checkpoint; ``wrapped`` are settings of the wrapper, if any."""
    run = TorchRun(None, plan.scaler, plan.notes)
    if plan.groups:
        run.optimizer = build(plan.groups, learning_rate)
        if wrapped is not None:
            run.optimizer = LossScaleOptimizer(run.optimizer, run.scaler, **wrapped)
            run.scaler = run.optimizer.scaler
    before = snapshot(model, *map(vars, model.modules()))
    try:
        _load_arrays(plan, model, run.optimizer)
    except BaseException:
        restore(before)
        raise
    return run


def _load_arrays(plan: Plan, model: nn.Module, optimizer: Optimizer | None) -> None:
    """Move a checkpoint's arrays to the model and the optimizer."""
    places = [
        (row, tensor)
        for held, row, _ in plan.places()
        if (tensor := held.get(row.torch)) is not None
    ]
    values = read_all(tensor for _, tensor in places)
    arrays: dict[str, mx.array] = {}
    for (row, _), value in zip(places, values, strict=True):
        arrays |= row.to_mlx(value)
    plan.table.change_model()
    dtypes = {name: x.dtype for name, x in tree_flatten(model.parameters())}
    weights = {name: arrays.pop(name) for name in dtypes if name in arrays}
    model.load_weights([*weights.items()], strict=False)
    if optimizer is not None:
        trained = model.trainable_parameters()
        held: set[str] = set().union(*(group.members for group in plan.groups))
        missing = [name for name, _ in tree_flatten(trained) if name not in held]
        if missing:
            raise ConvertError(
                "The PyTorch optimizer has no state for trainable parameters of the "
                f"MLX model: {list_some(missing)}. Freeze them in MLX before loading, "
                "for example with layer.freeze()."
            )
        for group in plan.groups:
            arrays[f"{group.prefix}step"] = mx.array(group.step, mx.uint64)
        inner = getattr(optimizer, "optimizer", optimizer)
        inner.init(trained)  # with zeros where PyTorch has no state
        flat = tree_flatten(inner.state)
        inner.state = tree_unflatten([(k, arrays.get(k, x)) for k, x in flat])
    if isinstance(optimizer, MasterWeightOptimizer):
        _round_weights(model, weights, dtypes, optimizer)
    # Until they are evaluated, transposed arrays keep the originals in memory.
    mx.eval(model.parameters(), optimizer.state if optimizer else [])


def _round_weights(
    model: nn.Module,
    weights: Mapping[str, mx.array],
    dtypes: Mapping[str, mx.Dtype],
    optimizer: MasterWeightOptimizer,
) -> None:
    """Cast a model's weights, and make the unrounded ones its master weights."""
    masters = tree_map(to_float32, model.trainable_parameters())
    cast = {name: x.astype(dtypes[name]) for name, x in weights.items()}
    infinite = [
        name
        for name, x in cast.items()
        if mx.any(mx.isfinite(x) != mx.isfinite(weights[name])).item()
    ]
    if infinite:
        raise ConvertError(
            f"These weights overflow in the model's dtype: {list_some(infinite)}. Keep "
            "their layers in float32."
        )
    model.load_weights([*cast.items()], strict=False)
    optimizer.init(model.trainable_parameters())
    optimizer.set_masters(model.trainable_parameters(), masters)


def build_optimizer(
    folder: str | os.PathLike[str], learning_rate: Any = None
) -> Optimizer:
    """Return the MLX optimizer of a converted run, for ``restore_checkpoint``.

    Args:
        folder (str): A folder that ``mlx_gradscale convert`` wrote. If the run was
            saved since with a ``LossScaleOptimizer`` or a ``MasterWeightOptimizer``,
            the result is one with the same settings.
        learning_rate (float, Callable or list, optional): As for
            :func:`~mlx_gradscale.convert.load_torch`.

    Returns:
        Optimizer: The optimizer, without its state.
    """
    saved = read_checkpoint(folder)
    run, wrapper = unwrap(saved), saved.description["settings"][0]
    optimizer = rebuild(run.description["settings"], run.optimizer, learning_rate)
    if wrapper["class"] not in WRAPPERS:
        return optimizer
    return WRAPPERS[wrapper["class"]](optimizer, **wrapper["values"])


def save_torch(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | None = None,
    scaler: GradScaler | None = None,
    *,
    like: Any,
    rename: Callable[[str], str] = str,
    layouts: Mapping[str, str] | None = None,
    drop: Collection[str] = (),
    keys: Mapping[str, str] | None = None,
    names: Collection[str] | None = None,
    accept: Collection[str] = (),
    overwrite: bool = True,
) -> list[str]:
    """Write an MLX run as a PyTorch checkpoint with the contents of an original.

    The original's weights, optimizer state, learning rates, step counts and scaler are
    replaced; in a Trainer folder, so are the step, the epoch and the schedule. All else
    is copied. If you passed ``rename`` to ``accept`` to :func:`load_torch`, pass them
    here too.

    Args:
        path (str): The file to write, or the folder if the original is a folder.
        model (nn.Module): The model. Master weights are written in place of
            half-precision ones.
        optimizer (Optimizer, optional): The optimizer. For a ``LossScaleOptimizer``,
            the states of the inner optimizer and the scaler are written. If omitted,
            the checkpoint is written without optimizer state.
        scaler (GradScaler, optional): The scaler. Default: the scaler of a
            ``LossScaleOptimizer``; otherwise, the original's scaler state is kept.
        like (str or object): The original: the path of a PyTorch checkpoint of the same
            model, or the result of ``torch_checkpoint.load``, in which you may have
            changed entries such as ``like["epoch"]``.
        rename (Callable): As for :func:`load_torch`.
        layouts (dict, optional): As for :func:`load_torch`.
        drop (list): As for :func:`load_torch`.
        keys (dict, optional): As for :func:`load_torch`.
        names (list, optional): As for :func:`load_torch`.
        accept (list): As for :func:`load_torch`.
        overwrite (bool): Whether to replace an existing file or folder. Default:
            ``True``.

    Returns:
        list: Notes on differences, and on entries that were copied although the run has
        moved on.

    Raises:
        ConvertError: If the run does not match the original or cannot be converted.
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
        >>> original = torch_checkpoint.load(folder + "a.pt")
        >>> original["epoch"] = 4
        >>> save_torch(folder + "b.pt", model, like=original)
        []
        >>> torch_checkpoint.load(folder + "b.pt")["model"]["weight"]
        array([[2, 2]], dtype=float32)
    """
    options = Options(rename, layouts or {}, drop, keys or {}, names, accept)
    is_path = isinstance(like, (str, os.PathLike))
    # The user's object is not changed: replace_tensors() makes new containers.
    source = read_source(like) if is_path else Source(replace_tensors(like, _to_tensor))
    check_target(Path(path), source, overwrite)
    plan = make_plan(source, model, options)
    optimizer = optimizer or Optimizer()  # the base class stands for none
    run = unwrap(capture(model, optimizer, find_scaler(optimizer, scaler)))
    notes = fill(plan, run, accept)
    write_source(Path(path), source)
    return notes if is_path else [n for n in notes if not n.startswith(_MOVED_ON)]


def _to_tensor(path: tuple[Any, ...], leaf: Any) -> Any:
    return Tensor.of(leaf) if isinstance(leaf, mx.array) else leaf


def unwrap(saved: Checkpoint) -> Checkpoint:
    """Return a checkpoint with master weights in place of half-precision ones.

    For a wrapped optimizer, the state and settings are the inner optimizer's.
    """
    weights, state, scaler = dict(saved.weights), saved.optimizer, saved.scaler
    settings = saved.description["settings"]
    if settings and settings[0]["class"] in WRAPPERS:
        if settings[0]["class"] == MasterWeightOptimizer.__name__:
            scaler = None  # its scale of 1 would underflow in PyTorch
        bits, settings = settings[0]["values"]["state_bits"], settings[1:]
        if bits != 32:
            inner = rebuild(settings, subtree("optimizer.", state))
            state = decode(state, inner, bits, weights)
        weights |= subtree("masters.", state)
        state = subtree("optimizer.", state)
    # The base class stands for no optimizer.
    if [row["class"] for row in settings] == ["Optimizer"]:
        state, settings = {}, []
    description = saved.description | {"settings": settings}
    return Checkpoint(weights, state, scaler, saved.extra, description)


def fill(plan: Plan, run: Checkpoint, accept: Collection[str]) -> list[str]:
    """Replace a checkpoint's values by those of a run, and return notes."""
    source, sections, tensors = plan.source, plan.sections, plan.tensors
    rows, settings = plan.table.rows, run.description["settings"]
    _check_model(rows, tensors, run.weights)
    arrays = run.optimizer | run.weights
    for held, row, parameter in plan.places():
        if row.mlx[0] in arrays:  # moments of parameters frozen in MLX are not
            row.write(held, arrays, parameter)
    for name, row in rows.items():  # the names of a tied tensor get the same one
        tensors[name] = tensors[row.torch]
    notes = [
        f"The MLX {kind}'s state is not written: the original has no {kind} state, or "
        f"keys={{'{kind}': ''}} (--{kind}-key '') omits it."
        for kind, is_held in (("optimizer", settings), ("scaler", run.scaler))
        if is_held and not sections[kind]
    ]
    old = new = 0  # steps
    if settings and plan.groups:
        notes += to_torch(plan.groups, run, accept)
        old = max(group.step for group in plan.groups)
        new = max(int(number(run.optimizer[f"{g.prefix}step"])) for g in plan.groups)
    elif plan.groups:
        for path in reversed(sections["optimizer"]):
            del get_at(path[:-1], source.tree)[path[-1]]
        notes.append("The run has no optimizer, so no optimizer state is written.")
    for path in sections["scaler"] if run.scaler else ():
        get_at(path, source.tree).update(run.scaler)
    moved = _move_trainer(source, old, new)
    if moved:
        notes.append(f"Moved from step {old} to step {new}: {', '.join(moved)}.")
    stale = [name for name in plan.others if name not in moved]
    if stale and old != new:
        notes.append(
            f"{_MOVED_ON}, but these entries are copied from the original: "
            f"{list_some(stale)}. If any of them count steps, set them in the original "
            "(torch_checkpoint.load) and pass it as like=, or set them in PyTorch. For "
            "a schedule, set its last_epoch; scheduler.step() would also change the "
            "learning rate."
        )
    return notes


def _check_model(
    rows: Mapping[str, Row],
    tensors: Mapping[str, Any],
    weights: Mapping[str, mx.array],
) -> None:
    """Raise unless the weights have the names and the shapes of the original's."""
    wrong = sorted(rows.keys() - tensors.keys())
    wanted: dict[str, Any] = {}
    for name, row in rows.items():
        wanted |= row.mlx_shapes(tensors[name].shape) if name in tensors else {}
    found = {name: x.shape for name, x in weights.items()}
    # Adapters lack the base model.
    names = wanted if is_adapter(rows) else wanted | found
    wrong += [name for name in names if wanted.get(name) != found.get(name)]
    if wrong:
        raise ConvertError(
            f"The MLX model and the original's model differ in {list_some(wrong)}. Use "
            "a PyTorch checkpoint of the same model."
        )


def _move_trainer(source: Source, was: int, now: int) -> list[str]:
    """Advance a Trainer's ``global_step``, ``epoch`` and schedule with the optimizer.

    ``train(resume_from_checkpoint=...)`` resumes from them. They change only if the
    original's ``global_step`` equals its optimizer's step count. The two differ after
    skipped steps. Return the names of the changed files.
    """
    state, moved = source.trainer, []
    if was == now or state.get("global_step") != was:
        return []
    if was and "epoch" in state:
        state["epoch"] = state["epoch"] * now / was
    for name, content in source.tree.items():
        key = "last_epoch" if "scheduler" in name else "global_step"
        if isinstance(content, dict) and content.get(key) == was:
            content[key] = now
            if "_step_count" in content:
                content["_step_count"] += now - was
            moved.append(name)
    return moved
