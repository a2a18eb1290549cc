"""Run a batch with a probe on every layer: how large values are, and where they go."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten, tree_map, tree_map_with_path

from ..diagnostics.probes import Event, Probes, probed, unchanged
from ..islands import float32_layers, kept_in_float32, remove_float32_layers
from ..islands.borrowed import Changes
from ..islands.where import Entry
from ..masters import to_float32
from ..precision import is_leaf

# Sums with random signs: as many that the distance of two arrays is known to some
# 20 percent from the distance of their sums, without keeping the arrays.
_SUMS = 64
_BEFORE_SUMS = 5


@dataclass
class Batch:
    """The arguments of a loss function."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass
class Value:
    """An array that entered or left a layer, or its gradient, without the array.

    Attributes:
        event (Event): What the probe noted.
        nan (int): How many; so ``positive_inf`` and ``negative_inf``.
        largest (float): The largest finite magnitude.
        positive (float): The largest finite value.
        sums (np.ndarray): With random signs, of finite values.
    """

    event: Event
    nan: int
    positive_inf: int
    negative_inf: int
    largest: float
    positive: float
    sums: np.ndarray

    @property
    def is_finite(self) -> bool:
        """Whether no element was NaN or infinite."""
        return not (self.nan or self.positive_inf or self.negative_inf)

    def distance(self, other: "Value") -> float:
        """Return how far away this is from ``other``, in units of its size."""
        size = float(np.linalg.norm(other.sums))
        off = float(np.linalg.norm(self.sums - other.sums))
        return off / size if size else (1.0 if off else 0.0)


@dataclass
class Run:
    """One forward and backward pass.

    Attributes:
        loss (float): The true loss.
        scale (float): The loss scale of the backward pass; it is taken out of all
            values.
        forward (list): The values at the layers' edges, in the order they came.
        backward (list): The same of the way back.
        gradients (dict): Of parameters, by path.
    """

    loss: float
    scale: float
    forward: list[Value]
    backward: list[Value]
    gradients: dict[str, Value]

    def gradients_are_finite(self) -> bool:
        """Tell whether all gradients are finite."""
        return all(value.is_finite for value in self.gradients.values())

    def gradient_distance(self, other: "Run") -> float:
        """Return how far all gradients together are away from another run's."""
        mine, others = self.gradients, other.gradients
        pairs = [(value.sums, others[path].sums) for path, value in mine.items()]
        size = sum(float(np.square(b).sum()) for _, b in pairs)
        off = sum(float(np.square(a - b).sum()) for a, b in pairs)
        return (off / size) ** 0.5 if size else float(off > 0)


@dataclass(frozen=True)
class Setting:
    """What is run, and how.

    Attributes:
        model (nn.Module): The model.
        loss_fn (Callable): As for ``nn.value_and_grad``.
        compute_dtype (Dtype or None): As for ``GradScaler.value_and_grad``.
        cast_inputs (bool): As for ``GradScaler.value_and_grad``.
        keep (Callable or None): As for ``GradScaler.value_and_grad``.
    """

    model: nn.Module
    loss_fn: Callable[..., Any]
    compute_dtype: mx.Dtype | None = None
    cast_inputs: bool = True
    keep: Callable[[str, mx.array], bool] | None = None


def run(
    setting: Setting,
    batch: Batch,
    where: Sequence[Entry] = (),
    *,
    scale: float = 1.0,
    float32: bool = False,
) -> Run:
    """Run a batch, forward and backward, and leave the model as it was.

    Args:
        setting (Setting): What to run.
        batch (Batch): The arguments of the loss function.
        where (list): The layers that compute in float32, instead of those that do.
        scale (float): The loss scale. Default: ``1.0``.
        float32 (bool): Run all of it in float32. Default: ``False``.
    """
    with (
        _prepared(setting, where, float32) as dtype,
        probed(setting.model, _measure) as probes,
    ):
        keep = None if float32 else setting.keep
        scaled_loss = _loss_of(setting, probes, batch, dtype, scale, float32)
        with kept_in_float32(setting.model, dtype, keep) as kept:
            parameters = setting.model.trainable_parameters()
            differentiate = mx.value_and_grad(lambda p: scaled_loss(p, kept))
            loss, gradients = differentiate(parameters)
        described, table = _described(gradients)
        # All at once and without the gradients, so that nothing waits for another run.
        del gradients
        events = [*probes.forward, *probes.backward]
        mx.eval(loss, table, [event.counts for event in events])
        probes.read()
    rows = zip(described, np.array(table).tolist(), strict=True)
    measured = {path: _value(replace(e, counts=row), scale) for (path, e), row in rows}
    return Run(
        loss.item() / scale,
        scale,
        [_value(event) for event in probes.forward],
        [_value(event, scale) for event in probes.backward],
        measured,
    )


def edge_dtypes(
    setting: Setting, batch: Batch, where: Sequence[Entry]
) -> list[tuple[str, mx.Dtype]]:
    """Return paths and dtypes of what enters and leaves layers; computes nothing."""
    with (
        _prepared(setting, where, False) as dtype,
        probed(setting.model, lambda _: mx.zeros(())) as probes,
    ):
        keep = setting.keep
        loss = _loss_of(setting, probes, batch, dtype, 1.0, False)
        with kept_in_float32(setting.model, dtype, keep) as kept:
            loss(setting.model.trainable_parameters(), kept)
    return [(event.path, event.dtype) for event in probes.forward]


@contextlib.contextmanager
def _prepared(
    setting: Setting, where: Sequence[Entry], float32: bool
) -> Iterator[mx.Dtype | None]:
    """Change the model for a run, and back; yield what parameters are cast to."""
    with unchanged(setting.model):
        remove_float32_layers(setting.model)
        if float32:
            Changes(to_float32).raise_module(setting.model, True)
        float32_layers(setting.model, list(where))
        yield None if float32 else setting.compute_dtype


def _loss_of(
    setting: Setting,
    probes: Probes,
    batch: Batch,
    dtype: mx.Dtype | None,
    scale: float,
    float32: bool,
) -> Callable[..., Any]:
    """Return the scaled loss as a function of the parameters."""
    args, kwargs = batch.args, batch.kwargs
    if float32 or (dtype is not None and setting.cast_inputs):
        to = mx.float32 if float32 or dtype is None else dtype
        args, kwargs = tree_map(lambda x: _cast(x, to), (args, kwargs), is_leaf=is_leaf)
    watched = probes.ends_with(setting.loss_fn)

    def scaled_loss(parameters: Any, kept: Callable[..., Any]) -> mx.array:
        if dtype is not None:
            parameters = tree_map_with_path(
                lambda path, x: x if kept(path, x) else _cast(x, dtype), parameters
            )
        setting.model.update(parameters)
        outputs = watched(*args, **kwargs)
        loss = outputs[0] if isinstance(outputs, tuple) else outputs
        if not isinstance(loss, mx.array) or loss.size != 1:
            raise TypeError(f"The loss must be an array with one value, got {loss!r}.")
        return loss.astype(mx.float32).reshape(()) * scale

    return scaled_loss


def _cast(x: Any, dtype: mx.Dtype) -> Any:
    floating = isinstance(x, mx.array) and mx.issubdtype(x.dtype, mx.floating)
    return x.astype(dtype) if floating else x


def _measure(x: mx.array) -> mx.array:
    """Return counts of what is not finite, the largest values, and sums."""
    if not x.size:
        return mx.zeros(_BEFORE_SUMS + _SUMS)
    nan, positive, negative = mx.isnan(x), mx.isposinf(x), mx.isneginf(x)
    finite = mx.where(nan | positive | negative, 0, x).astype(mx.float32).reshape(-1)
    counts = [mx.sum(each).astype(mx.float32) for each in (nan, positive, negative)]
    largest = [mx.max(mx.abs(finite)), mx.max(finite)]
    signed = mx.concatenate([finite * _signs(x.size), mx.zeros(-x.size % _SUMS)])
    sums = signed.reshape(-1, _SUMS).sum(axis=0)
    return mx.concatenate([mx.stack(counts + largest), sums])


def _signs(size: int) -> mx.array:
    # A hash of the index, because drawn ones would have to be kept.
    bits = mx.arange(size, dtype=mx.uint32) * mx.array(2654435761, mx.uint32)
    bits = (bits ^ (bits >> 15)) * mx.array(2246822519, mx.uint32)
    return 1.0 - 2.0 * ((bits >> 16) & 1).astype(mx.float32)


def _described(gradients: Any) -> tuple[list[tuple[str, Event]], mx.array]:
    """Return an event for every floating leaf, and what is measured of it, lazily."""
    leaves = [
        (path, x)
        for path, x in tree_flatten(gradients)
        if mx.issubdtype(x.dtype, mx.floating)
    ]
    events = [
        (path, Event(path, None, "output", 0, None, x.dtype, x.size, None))
        for path, x in leaves
    ]
    rows = [_measure(x) for _, x in leaves]
    return events, mx.stack(rows) if rows else mx.zeros((0, _BEFORE_SUMS + _SUMS))


def _value(event: Event, scale: float = 1.0) -> Value:
    nan, positive_inf, negative_inf, largest, positive = event.counts[:_BEFORE_SUMS]
    sums = np.array(event.counts[_BEFORE_SUMS:], dtype=np.float64) / scale
    counts = (int(nan), int(positive_inf), int(negative_inf))
    return Value(event, *counts, largest / scale, positive / scale, sums)
