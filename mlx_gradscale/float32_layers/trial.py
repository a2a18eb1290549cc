"""Run one batch forward and backward, with every layer measured."""

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_map

from ..core.finite import is_floating
from ..core.masters import to_float32
from ..core.scaler import GradScaler
from ..core.trees import commit, flatten, slots
from .layers import float32_layers
from .probes import Probes, Value, is_module, measure, probed
from .where import module_path, ordered_modules


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
    """

    loss: float
    scale: float
    forward: list[Value]
    backward: list[Value]
    gradients: dict[str, Value]

    @property
    def has_finite_gradients(self) -> bool:
        """Whether the gradients of all parameters are finite."""
        return all(value.is_finite for value in self.gradients.values())

    def gradient_distance(self, other: "Run") -> float:
        """Return the relative distance of all gradients together to another run's."""
        pairs = [
            (x.sums, other.gradients[path].sums) for path, x in self.gradients.items()
        ]
        norm = sum(float(np.square(b).sum()) for _, b in pairs)
        off = sum(float(np.square(a - b).sum()) for a, b in pairs)
        return (off / norm) ** 0.5 if norm else float(off > 0)


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
    if in_float32:
        setting = Setting(setting.model, setting.loss_fn)
        arguments = (batch.args, batch.kwargs)
        batch = Batch(*tree_map(_to_float32, arguments, is_leaf=is_module))
    with _prepared(setting, where, in_float32) as probes:
        loss_fn = probes.mark_end_of_forward(setting.loss_fn)
        loss, grads = differentiate(replace(setting, loss_fn=loss_fn), batch, scale)
        modules = dict(ordered_modules(setting.model))
        gradients = {
            path: Value(
                path,
                module_path(modules, path),
                "gradient",
                0,
                None,
                x.dtype,
                x.size,
                measure(x),
                has_gradient=True,
            )
            for path, x in flatten(grads)
            if is_floating(x)
        }
        # Without the gradients, so that they are not kept until the end.
        del grads
        scaled = len(probes.forward), len(probes.forward) + len(probes.backward)
        values = [*probes.forward, *probes.backward, *gradients.values()]
        rows = np.array(mx.stack([value.measured for value in values]))
        for i, (value, row) in enumerate(zip(values, rows, strict=True)):
            # The gradients of parameters are unscaled already.
            value.read(row, scale if scaled[0] <= i < scaled[1] else 1.0)
        return Run(float(loss), scale, probes.forward, probes.backward, gradients)


def edge_dtypes(
    setting: Setting, batch: Batch, where: Sequence[str]
) -> list[tuple[str, mx.Dtype]]:
    """Return path and dtype of all values at the edges of layers; computes nothing."""
    with _prepared(setting, where, False) as probes:
        loss_fn = probes.mark_end_of_forward(setting.loss_fn)
        differentiate(replace(setting, loss_fn=loss_fn), batch)
    return [(value.path, value.dtype) for value in probes.forward]


def differentiate(
    setting: Setting, batch: Batch, scale: float = 1.0
) -> tuple[mx.array, Any]:
    """Return the loss and its unscaled gradients, lazily and without warnings."""
    casting: dict[str, Any] = {}
    if setting.compute_dtype is not None:
        casting = {"keep": setting.keep, "cast_inputs": setting.cast_inputs}
    scaler = GradScaler(init_scale=scale, dynamic=False)
    loss_and_grad = scaler.value_and_grad(
        setting.model, setting.loss_fn, setting.compute_dtype, **casting
    )
    with warnings.catch_warnings():
        # The reports say what is wrong; warnings of trial runs would repeat it.
        warnings.simplefilter("ignore")
        outputs, grads = loss_and_grad(*batch.args, **batch.kwargs)
    return outputs[0] if isinstance(outputs, tuple) else outputs, grads


@contextlib.contextmanager
def _prepared(
    setting: Setting, where: Sequence[str] | None, in_float32: bool
) -> Iterator[Probes]:
    with probed(setting.model) as probes:
        if in_float32:
            where = []
            commit(
                (container, key, to_float32(container[key]))
                for _, container, key in slots(setting.model)
                if not isinstance(container, tuple)
            )
        if where is not None:
            float32_layers(setting.model, where)
        yield probes


def _to_float32(x: Any) -> Any:
    return to_float32(x) if isinstance(x, mx.array) else x
