"""Where a run of mlx-lm is in its data, and how to get there again.

mlx-lm draws the order of an epoch from NumPy's global generator, which validation
draws from as well. So a position is the generator as it was when the epoch began, how
many batches of the epoch are behind, and the generator as it is now.
"""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np


class Position:
    """mlx-lm's batches, with something to be done after each iteration.

    Args:
        iterate_batches (Callable): mlx-lm's.
        after (Callable): Is given the number of each iteration that is complete, but
            of the last, which ends without another batch being asked for.
    """

    def __init__(
        self, iterate_batches: Callable[..., Any], after: Callable[[int], None]
    ):
        self._iterate_batches = iterate_batches
        self._after = after
        self._epoch: dict[str, Any] = {}
        self._batch = 0
        self._goes_on: dict[str, Any] | None = None
        #: How many iterations are complete, or under way.
        self.iteration = 0

    def batches(self, *args: Any, loop: bool = False, **kwargs: Any) -> Iterator[Any]:
        """Take the place of mlx-lm's ``iterate_batches``.

        Args:
            *args (Any): As there.
            loop (bool): Whether this is for training; the other is for validation.
            **kwargs (Any): As there.
        """
        if not loop:
            yield from self._iterate_batches(*args, loop=False, **kwargs)
            return
        while True:
            start, goes_on = 0, self._goes_on
            if goes_on:
                _set_generator(goes_on["epoch"])
                start, self._goes_on = goes_on["batch"], None
            self._epoch = _generator()
            epoch = self._iterate_batches(*args, loop=False, **kwargs)
            for i, batch in enumerate(epoch):
                if goes_on and i == start:
                    _set_generator(goes_on["now"])
                if i < start:
                    continue
                self._batch = i + 1
                self.iteration += 1
                yield batch
                self._after(self.iteration)
            if goes_on and start == self._batch:
                _set_generator(goes_on["now"])

    def save(self) -> dict[str, Any]:
        """Return the position after the last batch, as plain Python values."""
        now = _generator()
        return {
            "iteration": self.iteration,
            "epoch": self._epoch,
            "batch": self._batch,
            "now": now,
        }

    def restore(self, saved: dict[str, Any]) -> None:
        """Go on from what :meth:`save` returned."""
        self.iteration = saved["iteration"]
        self._batch = saved["batch"]
        self._goes_on = saved


def _generator() -> dict[str, Any]:
    state = np.random.get_state(legacy=False)  # noqa: NPY002 - mlx-lm's
    inner = {**state["state"], "key": state["state"]["key"].tolist()}
    return {**state, "state": inner}


def _set_generator(state: dict[str, Any]) -> None:
    key = np.array(state["state"]["key"], np.uint32)
    inner = {**state["state"], "key": key}
    np.random.set_state({**state, "state": inner})  # noqa: NPY002 - mlx-lm's
