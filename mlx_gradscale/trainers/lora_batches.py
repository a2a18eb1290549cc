"""mlx-lm's training batches, from a position that can be saved."""

from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
import numpy as np


class Batches:
    """The batches of one epoch after the other.

    mlx-lm draws the order of an epoch from NumPy's global generator, and validation
    draws from it as well. So a position is the generator when the epoch began, the
    number of batches since, and the generator now.

    Args:
        iterate_epoch (Callable): Returns the batches of one epoch.
    """

    def __init__(self, iterate_epoch: Callable[[], Iterator[Any]]):
        self._iterate_epoch = iterate_epoch
        self._epoch: dict[str, Any] = {}
        self._batch = 0
        self._saved: dict[str, Any] | None = None

    def first(self) -> Any:
        """Return a batch without moving the position."""
        now = _generator()
        batch = next(self._iterate_epoch())
        _set_generator(now)
        return batch

    def __iter__(self) -> Iterator[Any]:
        """Yield batches without end."""
        while True:
            saved, self._saved, start = self._saved, None, 0
            if saved:
                _set_generator(saved["epoch"])
                start = saved["batch"]
            self._epoch, self._batch = _generator(), 0
            for batch in self._iterate_epoch():
                if saved and self._batch == start:
                    _set_generator(saved["now"])
                self._batch += 1
                if self._batch > start:
                    yield batch
            if saved and self._batch == start:
                _set_generator(saved["now"])

    def position(self) -> dict[str, Any]:
        """Return the position after the last batch."""
        return {"epoch": self._epoch, "batch": self._batch, "now": _generator()}

    def resume(self, position: dict[str, Any]) -> None:
        """Continue after a position that :meth:`position` returned."""
        self._saved = position


def _generator() -> dict[str, Any]:
    state: Any = np.random.get_state(legacy=False)  # noqa: NPY002 - mlx-lm's
    return {
        **state,
        "state": {**state["state"], "key": mx.array(state["state"]["key"])},
    }


def _set_generator(state: dict[str, Any]) -> None:
    inner = {**state["state"], "key": np.array(state["state"]["key"])}
    np.random.set_state({**state, "state": inner})  # noqa: NPY002 - mlx-lm's
