"""Measure how much of an update rounds away in half-precision weights."""

import copy
import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.optimizers import Optimizer, clip_grad_norm
from mlx.utils import tree_map

from ..core.masters import HALF, Storage
from ..core.optimizer import MasterWeightOptimizer
from ..core.optimizers import (
    check_supported,
    initialize,
    single_optimizers,
    split,
)
from ..core.trees import flatten, get_at, is_floating, leaves, walk
from ..files.text import align, dtype_name
from ..float32.trial import Trial, preserved

_WORST = 10


@dataclass(frozen=True)
class LostUpdates:
    """What rounding throws away of an update, from :func:`lost_updates`.

    Attributes:
        lost (float): The share of the update that is lost: 1 minus the projection of
            what moves on the update. NaN if the update is zero, and slightly negative
            if more is rounded up than down.
        stuck (float): The share of weights with an update that would not move. NaN if
            the update is zero.
        layers (dict): Maps the path of each layer to its own ``LostUpdates``.
        verdict (str): The result in one sentence.
    """

    lost: float
    stuck: float
    layers: dict[str, "LostUpdates"] = field(default_factory=dict)
    verdict: str = ""

    def __str__(self) -> str:
        found = {k: x for k, x in self.layers.items() if not math.isnan(x.lost)}
        worst = sorted(found, key=lambda path: -found[path].lost)[:_WORST]
        rows = [(x, _format(found[x].lost), _format(found[x].stuck)) for x in worst]
        if hidden := len(found) - len(worst):
            rows.append((f"{hidden} more", "", ""))
        rows.append(("all layers", _format(self.lost), _format(self.stuck)))
        return f"{align([('layer', 'lost', 'stuck'), *rows])}\n{self.verdict}"


def lost_updates(
    optimizer: Optimizer,
    model: nn.Module,
    loss_fn: Callable[..., Any],
    *batch: Any,
    **named: Any,
) -> LostUpdates:
    """Measure how much of the next update would round away without master weights.

    A half-precision weight moves only if its update is larger than about half of the
    distance to the next number. This function computes the update of one batch in
    float32, adds it to the weights as they are, and compares it with what has moved
    after rounding. The model, the optimizer and the random state do not change.

    Args:
        optimizer (Optimizer): A plain optimizer, or a ``MasterWeightOptimizer`` or
            ``LossScaleOptimizer``, which loses nothing itself.
        model (nn.Module): The model, in float16 or bfloat16.
        loss_fn (Callable): Same as in ``value_and_grad``.
        *batch (Any): The arguments of ``loss_fn``.
        **named (Any): Keyword arguments of ``loss_fn``.

    Returns:
        LostUpdates: The shares that are lost and stuck; print it for a table.

    Example:
        >>> import mlx.core as mx, mlx.nn as nn, mlx.optimizers as optim
        >>> from mlx_gradscale.diagnostics import lost_updates
        >>> model, x = nn.Linear(2, 1, bias=False), mx.ones((1, 2), mx.bfloat16)
        >>> model.weight = mx.ones((1, 2), mx.bfloat16)
        >>> print(lost_updates(optim.SGD(1e-3), model, lambda x: model(x).sum(), x))
        layer       lost  stuck
        weight      100%   100%
        all layers  100%   100%
        Plain bfloat16 would lose 100% of an update at 0.001.
    """
    scale = 1.0
    if isinstance(optimizer, MasterWeightOptimizer):
        scale = optimizer.scaler.get_scale()
    with preserved(model):
        _, gradients = Trial(model, loss_fn, batch, named).differentiate(scale)
        weights = model.trainable_parameters()
        sums, rate = _measure(optimizer, weights, gradients)
        # All of it is lazy until here. One at a time, so that the float32 arrays of a
        # weight are freed before those of the next one are computed.
        del gradients
        for x in sums.values():
            mx.eval(x)
    layers: dict[str, list[mx.array]] = {}
    for path, x in sums.items():
        layers.setdefault(path.rpartition(".")[0] or path, []).append(x)
    parts = {path: LostUpdates(*_shares(found)) for path, found in layers.items()}
    lost, stuck = _shares(list(sums.values()))
    if math.isnan(stuck):
        verdict = (
            "The update is zero everywhere, as in the first step of a warm-up, so "
            "there is nothing to lose. Measure a later step."
        )
    elif math.isnan(lost):
        verdict = (
            "The update of this batch is non-finite. To find the cause, call "
            "mlx_gradscale.diagnostics.explain_overflow()."
        )
    else:
        dtypes = {x.dtype for _, x in flatten(weights) if is_floating(x)}
        dtypes = dtypes.intersection(HALF) or dtypes
        names = " and ".join(sorted(map(dtype_name, dtypes)))
        at = "" if rate is None else f" at {float(rate):.3g}".replace("e-0", "e-")
        verdict = f"Plain {names} would lose {_format(lost)} of an update{at}."
    return LostUpdates(lost, stuck, parts, verdict)


def _measure(
    optimizer: Any, weights: Any, gradients: Any
) -> tuple[dict[str, mx.array], mx.array | None]:
    """Lazily compute the sums for :func:`_shares` by weight, and the learning rate."""
    masters, storage = weights, Storage()
    if isinstance(optimizer, MasterWeightOptimizer):
        masters, storage = optimizer.masters(weights), optimizer._storage
        if optimizer.max_grad_norm is not None:
            gradients, _ = clip_grad_norm(gradients, optimizer.max_grad_norm)
        optimizer = optimizer.optimizer
    check_supported(optimizer)
    # A third-party optimizer may modify arrays in place, but not these new objects.
    arrays = {id(x): x.astype(x.dtype) for x in leaves([optimizer.state])}
    optimizer = copy.deepcopy(optimizer, arrays)
    full = tree_map(lambda x: x.astype(mx.float32), masters)
    for part, tree in split(optimizer, gradients):
        for (place, _, _), _ in walk(tree):
            with suppress(KeyError, IndexError):  # not initialized
                box = get_at(place[:-1], part.state)
                box[place[-1]] = storage.decode(part, box[place[-1]])
    initialize(optimizer, full, Storage())
    halves, before, sums = dict(flatten(weights)), dict(flatten(masters)), {}
    for part, own in split(optimizer, gradients):
        for path, after in flatten(part.apply_gradients(own, full)):
            weight, update = halves[path], after - before[path]
            moved = (weight + update).astype(weight.dtype) - weight.astype(mx.float32)
            is_updated = update != 0
            is_stuck = is_updated & (moved == 0)
            terms = [moved * update, update * update, is_stuck, is_updated]
            sums[path] = mx.stack([mx.sum(x).astype(mx.float32) for x in terms])
    return sums, single_optimizers(optimizer)[0].state.get("learning_rate")


def _shares(sums: list[mx.array]) -> tuple[float, float]:
    """Return the lost and the stuck share, given the sums of some weights."""
    moved, updated, n_stuck, n_updated = np.array(sums, np.float64).sum(axis=0)
    if not n_updated:
        return math.nan, math.nan
    return float(1 - moved / updated), float(n_stuck / n_updated)


def _format(share: float) -> str:
    return f"{max(share, 0.0):.0%}"
