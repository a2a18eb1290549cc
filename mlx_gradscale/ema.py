"""An exponential moving average of the weights that ignores skipped steps."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.optimizers import Optimizer
from mlx.utils import tree_flatten

from .core.masters import to_float32
from .core.optimizer import MasterWeightOptimizer
from .core.trees import is_floating


class EMA:
    """Keep an exponential moving average of the trainable weights, in float32.

    With a ``LossScaleOptimizer`` or ``MasterWeightOptimizer``, skipped steps do not
    count, and the average is over the float32 master weights, because a step is often
    too small to change a half-precision weight.

    Args:
        model (nn.Module): The model whose weights initialize the average.
        optimizer (Optimizer, optional): The optimizer of the model. Only the two above
            make a difference. Default: ``None``.
        decay (float): The weight of the old average in an update. Default: ``0.999``.

    Example:
        >>> import mlx.core as mx, mlx.nn as nn
        >>> from mlx_gradscale.ema import EMA
        >>> model = nn.Linear(1, 1, bias=False)
        >>> model.weight = mx.array([[1.0]])
        >>> ema = EMA(model, decay=0.5)
        >>> model.weight = mx.array([[3.0]])
        >>> ema.update(model)
        >>> with ema.swapped_into(model):
        ...     print(model.weight)
        array([[2]], dtype=float32)
        >>> model.weight
        array([[3]], dtype=float32)
    """

    def __init__(
        self, model: nn.Module, optimizer: Optimizer | None = None, decay: float = 0.999
    ):
        if optimizer is not None and not isinstance(optimizer, Optimizer):
            raise TypeError(
                f"optimizer must be an mlx.optimizers.Optimizer, got {optimizer!r}. "
                "Pass the decay by name: EMA(model, decay=0.999)."
            )
        if not 0 <= decay < 1:
            raise ValueError(f"decay must be at least 0 and below 1, got {decay!r}.")
        self._wrapper: MasterWeightOptimizer | None = None
        if isinstance(optimizer, MasterWeightOptimizer):
            self._wrapper = optimizer
        # Store 1 - decay, because float32 would round a decay close to 1 to 1.
        # Copy the weights, because ``weight += 1`` modifies an array in place.
        self._state: dict[str, Any] = {
            "rate": mx.array(1.0 - decay),
            "weights": {path: mx.array(x) for path, x in self._full(model).items()},
        }
        mx.eval(self._state)

    @property
    def state(self) -> dict[str, Any]:
        """The tree to pass to ``mx.compile`` and to save.

        Save it with ``save_checkpoint(..., ema=ema.state)`` and restore it with
        ``ema.state = restore_checkpoint(...)["ema"]``. Assigning a state replaces the
        arrays in the existing dicts.
        """
        return self._state

    @state.setter
    def state(self, state: dict[str, Any]) -> None:
        weights = dict(tree_flatten(state["weights"]))  # nested after tree_unflatten
        self._check("the loaded state", weights)
        self._state["rate"] = mx.array(state["rate"])
        self._state["weights"].update(weights)

    def update(self, model: nn.Module, applied: mx.array | None = None) -> None:
        """Update the average after a step.

        Args:
            model (nn.Module): The model to average.
            applied (array, optional): If false, the average does not change. With a
                ``GradScaler``, pass the result of its ``step``. Default: whether the
                optimizer passed to ``EMA`` applied its last step.
        """
        if applied is None and self._wrapper is not None:
            applied = self._wrapper.scaler.last_step_applied
        rate, averages = self._state["rate"], self._state["weights"]
        now = self._full(model)
        self._check("the model", now)
        for path, average in averages.items():
            new = average + rate * (now[path] - average)
            averages[path] = new if applied is None else mx.where(applied, new, average)

    @contextmanager
    def swapped_into(self, model: nn.Module) -> Iterator[None]:
        """Load the average into the model for a ``with`` block, to evaluate or export.

        The average is cast to the model's dtypes. On exit, the model's own weights are
        restored.

        Args:
            model (nn.Module): The model to change.
        """
        own = model.parameters()  # including any that were frozen since
        averages = self._state["weights"]
        found = {path: x for path, x in tree_flatten(own) if path in averages}
        self._check("the model", found)
        cast = [(path, averages[path].astype(x.dtype)) for path, x in found.items()]
        try:
            model.load_weights(cast, strict=False)
            yield
        finally:
            model.update(own)

    def _check(self, what: str, weights: dict[str, mx.array]) -> None:
        averages = self._state["weights"]
        here, there = ({p: x.shape for p, x in t.items()} for t in (averages, weights))
        for path in sorted(here.keys() | there.keys()):
            if here.get(path) != there.get(path):
                raise ValueError(
                    f"The average of {path!r} has shape {here.get(path)}, but {what} "
                    f"has {there.get(path)}. Use the same model. After freezing, "
                    "unfreezing or changing layers, create a new EMA."
                )

    def _full(self, model: nn.Module) -> dict[str, mx.array]:
        tree = model.trainable_parameters()
        if self._wrapper is not None:
            tree = self._wrapper.masters(tree)
        return {p: to_float32(x) for p, x in tree_flatten(tree) if is_floating(x)}
