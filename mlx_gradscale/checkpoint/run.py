"""``save_checkpoint`` and ``restore_checkpoint``, on one rank or on several."""

import os
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx.nn.layers.distributed import FullyShardedModule
from mlx.optimizers import Optimizer

from ..core.finite import all_finite
from ..core.optimizer import MasterWeightOptimizer
from ..core.optimizers import needs_init, single_optimizers
from ..core.ranks import Group, Ranks
from ..core.scaler import GradScaler
from ..core.trees import flatten, restore, snapshot
from ..distributed import compare, raise_together
from .folder import describe_error, read_on_ranks, write_on_ranks
from .parts import (
    capture,
    check_settings,
    find_scaler,
    find_seed,
    restore_model,
    restore_optimizer,
    restore_scaler,
)


def save_checkpoint(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer,
    scaler: GradScaler | None = None,
    *,
    keep: int = 1,
    frozen: bool | None = None,
    **extra: Any,
) -> None:
    """Save a run: model, optimizer, scaler, random state and any extra values.

    A run resumed with :func:`restore_checkpoint` is bit-identical to one that was not
    interrupted. Each call adds a folder ``save-000001``, ``save-000002``, ... to
    ``path`` and then removes all but the newest ``keep`` checkpoints. The newest one is
    complete even if a save is interrupted. Files that no save has written are never
    removed. ``mx.load`` reads the weights from ``model.safetensors`` in each folder;
    see ``latest_checkpoint``. Learning rate schedules are Python code and are not
    saved, but the step count that they depend on is.

    In distributed training, all ranks must call this, and the random state of every
    rank is saved. Rank 0 writes everything else: trainable parameters and states must
    be equal on all ranks; ``extra``, frozen parameters and buffers, such as BatchNorm's
    statistics, are taken from rank 0. If the optimizer was created with ``sharded=``,
    or the model has a layer from ``nn.fully_shard``, each rank writes its own values
    instead, so all ranks must have access to ``path``.

    Args:
        path (str): The folder of the run. It is created if necessary.
        model (nn.Module): The model, saved with its buffers.
        optimizer (Optimizer): The optimizer.
        scaler (GradScaler, optional): The scaler of the training loop. Omit it for a
            ``LossScaleOptimizer``, whose scaler is always saved.
        keep (int): How many checkpoints to keep in ``path``. Default: ``1``.
        frozen (bool, optional): Whether to save frozen parameters. If not, load the
            same values into the model before restoring. Default: ``True``, or ``False``
            for a model with LoRA layers.
        **extra (Any): Other values that the loop needs, such as the step or the
            position in the data. They may be None, bool, int, float, str, arrays, and
            lists, tuples and dicts of these; dict keys must be strings.

    Raises:
        ValueError: If a trainable parameter or the optimizer state contains NaN or inf.
            Nothing is saved.

    Example:
        >>> import mlx.core as mx, mlx.nn as nn, mlx.optimizers as optim, tempfile
        >>> from mlx_gradscale import restore_checkpoint, save_checkpoint
        >>> model, optimizer = nn.Linear(2, 1), optim.AdamW(1e-3)
        >>> folder = tempfile.mkdtemp()
        >>> save_checkpoint(folder, model, optimizer, step=180)
        >>> saved = mx.array(model.weight)
        >>> model.weight = mx.zeros((1, 2))
        >>> restore_checkpoint(folder, model, optimizer)
        {'step': 180}
        >>> mx.array_equal(model.weight, saved)
        array(True, dtype=bool)
    """
    scaler = find_scaler(optimizer, scaler)
    if type(keep) is not int or keep < 1:
        raise ValueError(f"keep must be 1 or more, got {keep!r}.")
    group, call = find_group(optimizer, scaler), "save_checkpoint"
    if isinstance(optimizer, MasterWeightOptimizer) and needs_init(optimizer.optimizer):
        optimizer.init(model.trainable_parameters())
    key = cast(list[mx.array], mx.random.state)[0]
    keys = mx.distributed.all_gather(key[None], group=group)
    mx.eval(keys)  # on every rank
    with raise_together(group, call):
        saved = capture(model, optimizer, scaler, frozen)._replace(extra=extra)
        values = _check_finite(model, saved.optimizer)
    saved.description["random"] = keys
    shards = None if group.size() == 1 else find_shards(model, optimizer)
    if shards is not None:  # each rank saves its own state
        weights = values["model"]
        values = {"model": {p: x for p, x in weights.items() if p not in shards}}
    compare(values | {"scaler": scaler.state if scaler else {}}, group, call)
    write_on_ranks(path, saved, keep, shards is not None, group, call)


def restore_checkpoint(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer,
    scaler: GradScaler | None = None,
) -> dict[str, Any]:
    """Restore, in place, a run that :func:`save_checkpoint` saved.

    The model, the optimizer, the scaler and the random state are restored. Arrays are
    replaced in the containers that hold them, so a step that is already compiled uses
    the new values.

    First create the model, the optimizer and the scaler as in the saved run, including
    schedules; the resumed run is then bit-identical to an uninterrupted one. Without a
    schedule, the learning rate is restored too. In distributed training, all ranks must
    call this; only rank 0 reads. Another number of ranks can restore the run, but its
    results may differ. A sharded run needs the same number of ranks, each of which
    reads its own shards.

    Args:
        path (str): The folder of the run, to restore its newest checkpoint, or one of
            the ``save-...`` folders in it.
        model (nn.Module): A model whose weights have the saved names, shapes and
            dtypes. Frozen weights that were not saved must have the same values.
        optimizer (Optimizer): An optimizer of the same class and with the same settings
            as the saved one. It does not have to be initialized.
        scaler (GradScaler, optional): Same as in :func:`save_checkpoint`.

    Returns:
        dict: The ``extra`` values passed to :func:`save_checkpoint`.

    Raises:
        FileNotFoundError: If there is no checkpoint.
        ValueError: If the checkpoint is damaged or does not match the model, the
            optimizer or the scaler. Nothing is changed.

    Example:
        >>> import mlx.nn as nn, mlx.optimizers as optim, tempfile
        >>> from mlx_gradscale import restore_checkpoint, save_checkpoint
        >>> folder = tempfile.mkdtemp()
        >>> save_checkpoint(folder, nn.Linear(2, 1), optim.AdamW(1e-3), epoch=3)
        >>> restore_checkpoint(folder, nn.Linear(2, 1), optim.AdamW(1e-3))["epoch"]
        3
    """
    scaler = find_scaler(optimizer, scaler)
    group, call = find_group(optimizer, scaler), "restore_checkpoint"
    saved = read_on_ranks(path, group, call)
    inner: Optimizer = getattr(optimizer, "optimizer", optimizer)
    owners = [optimizer, *single_optimizers(inner)]
    before = snapshot(model, *map(vars, owners), scaler.state if scaler else {})
    try:
        with raise_together(group, call):
            restore_model(model, saved.weights, saved.description["frozen"])
            check_settings(optimizer, saved.description["settings"])
            restore_scaler(scaler, saved.scaler)
            seed = find_seed(saved.description["random"], group)
        # The ranks now have equal weights, which init() of the optimizer may compare.
        with raise_together(group, call):
            restore_optimizer(model, optimizer, saved.optimizer)
        mx.random.seed(seed)
    except BaseException as error:
        restore(before)
        if not isinstance(error, Exception):
            raise
        text = f"Cannot restore {os.fspath(path)}: {describe_error(error)} "
        raise ValueError(f"{text}Nothing was changed.") from error
    return saved.extra


def find_group(optimizer: Optimizer, scaler: GradScaler | None) -> Group:
    """Return the distributed group of the optimizer or scaler, or the global one."""
    groups = (getattr(owner, "group", None) for owner in (optimizer, scaler))
    return next(filter(None, groups), None) or mx.distributed.init()


def find_shards(model: nn.Module, optimizer: Optimizer) -> set[str] | None:
    """Return the paths of the parameters that are shards, or None without sharding."""
    ranks = getattr(optimizer, "_ranks", Ranks())
    prefixes = tuple(
        f"{path}." if path else ""
        for path, module in model.named_modules()
        if isinstance(module, FullyShardedModule)
    )
    if not ranks.sharded and not prefixes:
        return None
    parameters = flatten(model.parameters())
    return {p for p, x in parameters if p.startswith(prefixes) or ranks.is_shard(p, x)}


def _check_finite(
    model: nn.Module, state: dict[str, Any]
) -> dict[str, dict[str, mx.array]]:
    """Return all arrays that steps change; raise if one has non-finite values."""
    arrays = {path: x for path, x in state.items() if isinstance(x, mx.array)}
    arrays.pop("grad_norm", None)  # non-finite after a skipped step
    values = {"model": dict(flatten(model.trainable_parameters())), "optimizer": arrays}
    if not all_finite(values).item():
        path = next(p for p, x in flatten(values) if not all_finite([x]).item())
        raise ValueError(
            f"{path} contains NaN or inf, so nothing was saved. "
            "Restore an earlier checkpoint, if there is one, to continue."
        )
    return values
