"""An exponential moving average of the weights, right in skipped and compiled steps."""

from collections.abc import Iterator
from contextlib import contextmanager
from numbers import Real
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.optimizers import Optimizer
from mlx.utils import tree_flatten, tree_map_with_path

from .finite import is_floating
from .masters import to_float32
from .optimizer import LossScaleOptimizer
from .optimizer_state import write_in_place
from .state_tree import leaves_of, slots, writing


class EMA:
    """Average the trainable weights over the steps, in float32.

    Of a model in half precision the float32 masters are averaged: most steps are too
    small to show in a float16 weight. A step that was skipped does not count.

    Args:
        model (nn.Module): The average starts at its weights.
        optimizer (Optimizer, optional): A ``LossScaleOptimizer`` gives the masters and
            says which steps were applied. Default: ``None``.
        decay (float): How much of the average stays in each step. Default: ``0.999``.

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
        self,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        decay: float = 0.999,
    ):
        if not isinstance(decay, Real) or not 0 <= decay < 1:
            raise ValueError(f"decay must be from 0 to below 1, got {decay!r}.")
        self._optimizer: Optimizer | None = optimizer
        # One minus the decay, which float32 could not tell from 1 in the end. Arrays
        # of their own: ``weight += 1`` changes an array in place.
        self._state: dict[str, Any] = {
            "rate": mx.array(1.0 - decay),
            "weights": {path: mx.array(x) for path, x in self._full(model).items()},
        }
        mx.eval(self._state)

    @property
    def state(self) -> dict[str, Any]:
        """The tree to list in ``mx.compile`` and to save. Setting it writes in place.

        Save it with ``save_checkpoint(..., ema=ema.state)``, and bring it back with
        ``ema.state = restore_checkpoint(...)["ema"]``.
        """
        return self._state

    @state.setter
    def state(self, state: dict[str, Any]) -> None:
        try:
            write_in_place(self._state, dict(tree_flatten(state)))
        except (ValueError, AttributeError) as error:
            raise ValueError(
                f"This is not the state of an average of this model: {error}"
            ) from None

    def update(self, model: nn.Module, applied: mx.array | None = None) -> None:
        """Take the weights after a step into the average.

        Args:
            model (nn.Module): The model that is averaged.
            applied (array, optional): Where false, nothing changes: what the ``step``
                of a ``GradScaler`` returned. Default: whether the
                ``LossScaleOptimizer`` applied its last step, else true.
        """
        if applied is None and isinstance(self._optimizer, LossScaleOptimizer):
            applied = self._optimizer.scaler.last_step_applied
        rate, averages = self._state["rate"], self._state["weights"]
        now = self._full(model)
        for path in averages.keys() ^ now.keys():
            raise ValueError(
                f"{path!r} is trainable now or was when the average began, not both: "
                "make a new EMA after you freeze, unfreeze or change layers."
            )
        for path, average in averages.items():
            new = average + rate * (now[path] - average)
            averages[path] = new if applied is None else mx.where(applied, new, average)

    def weights(self, model: nn.Module) -> Any:
        """Return the average as a tree for ``model.update``, in the model's dtypes."""
        averages = self._state["weights"]
        return tree_map_with_path(
            lambda path, x: averages[path].astype(x.dtype) if path in averages else x,
            model.trainable_parameters(),
        )

    @contextmanager
    def swapped_into(self, model: nn.Module) -> Iterator[None]:
        """Give the model the average, to evaluate or export, and its own back after."""
        averages = self.weights(model)
        trained = {id(x) for x in leaves_of(model.trainable_parameters())}
        places = [(box, key, box[key]) for _, box, key in slots(model)]
        # A tuple cannot be written to, nor does update() do so.
        put_back = writing(
            [
                (box, key, x)
                for box, key, x in places
                if id(x) in trained and not isinstance(box, tuple)
            ]
        )
        try:
            model.update(averages)
            yield
        finally:
            put_back()

    def _full(self, model: nn.Module) -> dict[str, mx.array]:
        tree = model.trainable_parameters()
        if isinstance(self._optimizer, LossScaleOptimizer):
            tree = self._optimizer.masters(tree)
        return {p: to_float32(x) for p, x in tree_flatten(tree) if is_floating(x)}
