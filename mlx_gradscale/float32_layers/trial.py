"""Run one batch forward and backward, with every layer measured."""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_map

from ..core.finite import is_floating
from ..core.gradients import is_opaque, loss_of
from ..core.masters import to_float32
from ..core.scaler import GradScaler
from ..core.trees import commit, flatten, slots
from .calls import ordered_modules, owner_of
from .layers import float32_layers
from .probes import Call, Probes, Value, measure, probed, relative_distance


@dataclass
class Batch:
    """The arguments of a loss function."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Setting:
    """What to run, with the options of ``GradScaler.value_and_grad``."""

    model: nn.Module
    loss_fn: Callable[..., Any]
    compute_dtype: mx.Dtype | None = None
    cast_inputs: bool = True
    keep: Callable[[str, mx.array], bool] | None = None


@dataclass
class Run:
    """One forward and backward pass, with the loss scale taken out of all values.

    Attributes:
        loss (float): The loss.
        scale (float): The loss scale of the backward pass.
        forward (list): The values at the edges of layers, in the order of the calls.
        backward (list): Their gradients, in the order of the backward pass.
        gradients (dict): The gradients of parameters by path; their ``caller`` is the
            module of the parameter.
        loss_call (Call): The call of the loss function, with all others in it.
    """

    loss: float
    scale: float
    forward: list[Value]
    backward: list[Value]
    gradients: dict[str, Value]
    loss_call: Call

    @property
    def has_finite_gradients(self) -> bool:
        """Whether the gradients of all parameters are finite."""
        return all(value.is_finite for value in self.gradients.values())

    @property
    def is_finite(self) -> bool:
        """Whether the loss and all gradients are finite."""
        return bool(np.isfinite(self.loss)) and self.has_finite_gradients

    def gradient_distance(self, other: "Run") -> float:
        """Return the relative distance of all gradients together to another run's."""
        return relative_distance(
            [(value, other.gradients[path]) for path, value in self.gradients.items()]
        )


def run(
    setting: Setting,
    batch: Batch,
    where: Sequence[str] | None = None,
    *,
    scale: float = 1.0,
    in_float32: bool = False,
) -> Run:
    """Run a batch forward and backward, and leave the model unchanged.

    Args:
        setting (Setting): What to run.
        batch (Batch): The arguments of the loss function.
        where (list, optional): The float32 layers. Default: those of the model.
        scale (float): The loss scale. Default: ``1.0``.
        in_float32 (bool): Run the whole model in float32. Default: ``False``.
    """
    if not flatten(setting.model.trainable_parameters()):
        raise ValueError("The model has no trainable parameters: unfreeze some.")
    with _traced(setting, batch, where, scale, in_float32) as (probes, loss, grads):
        paths = [path for path, _ in ordered_modules(setting.model)]
        gradients = {}
        for path, x in flatten(grads):
            if is_floating(x):
                owner = owner_of(paths, path)
                value = Value(path, owner, "gradient", x.dtype, x.size, measure(x))
                gradients[path] = replace(value, has_gradient=True)
        # So that they are not kept until the end.
        grads.clear()
        values = [*probes.forward, *gradients.values(), *probes.backward]
        rows = np.array(mx.stack([value.measured for value in values]))
        for i, (value, row) in enumerate(zip(values, rows, strict=True)):
            # The gradients of parameters are unscaled already.
            is_scaled = i >= len(values) - len(probes.backward)
            value.read(row, scale if is_scaled else 1.0)
        return Run(
            float(loss),
            scale,
            probes.forward,
            probes.backward,
            gradients,
            probes.loss_call,
        )


@contextmanager
def _traced(
    setting: Setting,
    batch: Batch,
    where: Sequence[str] | None,
    scale: float = 1.0,
    in_float32: bool = False,
) -> Iterator[tuple[Probes, mx.array, Any]]:
    with probed(setting.model) as probes:
        if in_float32:
            setting, where = Setting(setting.model, setting.loss_fn), []
            arguments = (batch.args, batch.kwargs)
            batch = Batch(*tree_map(_to_float32, arguments, is_leaf=is_opaque))
            commit(
                (container, key, to_float32(container[key]))
                for _, container, key in slots(setting.model)
                if not isinstance(container, tuple)
            )
        if where is not None:
            float32_layers(setting.model, where)
        loss_fn = probes.mark_end_of_forward(setting.loss_fn)
        loss, grads = differentiate(replace(setting, loss_fn=loss_fn), batch, scale)
        yield probes, loss, grads


def differentiate(
    setting: Setting, batch: Batch, scale: float = 1.0
) -> tuple[mx.array, Any]:
    """Return the loss and its unscaled gradients, lazily and without warnings."""
    loss_and_grad = GradScaler(init_scale=scale, dynamic=False).value_and_grad(
        setting.model,
        setting.loss_fn,
        setting.compute_dtype,
        keep=setting.keep,
        cast_inputs=setting.cast_inputs,
    )
    with warnings.catch_warnings():
        # The reports say what is wrong; warnings of trial runs would repeat it.
        warnings.simplefilter("ignore")
        outputs, grads = loss_and_grad(*batch.args, **batch.kwargs)
    return loss_of(outputs), grads


def _to_float32(x: Any) -> Any:
    return to_float32(x) if isinstance(x, mx.array) else x
