"""PyTorch's stages: which optimizer has unscaled and stepped since the last update."""

import weakref
from dataclasses import dataclass
from functools import reduce
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.optimizers import Optimizer

from .finite import arrays, is_floating

_START_AFRESH = (
    "After an iteration that was cut short, update(get_scale()) starts afresh."
)


@dataclass
class Stage:
    """What happened with one optimizer since the last ``update()``."""

    optimizer: Optimizer
    finite: mx.array
    stepped: bool = False
    # Whose parameters were stepped, to know when its next iteration begins.
    model: "weakref.ref[nn.Module] | None" = None
    # The leaves that unscale_() was given, without keeping them alive.
    given: "tuple[weakref.ref[mx.array], ...]" = ()

    def was_given_any_of(self, grads: Any) -> bool:
        """Tell whether ``unscale_`` was given one of these leaves."""
        given = self._ids()
        return any(id(x) in given for x in arrays(grads))

    def was_given_all_of(self, grads: Any) -> bool:
        """Tell whether ``unscale_`` was given all of these floating leaves."""
        given = self._ids()
        return all(id(x) in given for x in arrays(grads) if is_floating(x))

    def _ids(self) -> set[int]:
        return {id(ref()) for ref in self.given if ref() is not None}


class Stages:
    """The stages of all optimizers of one scaler, and the misuse that they show."""

    def __init__(self) -> None:
        # By id, because an optimizer may define equality. The stage keeps it.
        self._by_id: dict[int, Stage] = {}
        self._was_cut_short = False

    def __bool__(self) -> bool:
        return bool(self._by_id)

    def of(self, optimizer: Optimizer) -> Stage | None:
        """Return the stage of an optimizer, None at the start of its iteration."""
        return self._by_id.get(id(optimizer))

    def begin(self, model: nn.Module) -> None:
        """Note that a model is about to be differentiated."""
        stepped = [s.model and s.model() for s in self._by_id.values() if s.stepped]
        if not any(whose is model for whose in stepped):
            return
        if self._was_cut_short:
            raise RuntimeError(
                "update() was not called after the last two steps: call it once at the "
                "end of each iteration, or minimize() instead of step()."
            )
        # Once, as after Ctrl-C between step() and update(): a new iteration begins.
        self._was_cut_short = True
        self._by_id.clear()

    def check_unscale(self, optimizer: Optimizer, are_true: bool) -> None:
        """Raise if an optimizer's gradients cannot be unscaled now."""
        stage = self.of(optimizer)
        if stage and stage.stepped:
            raise RuntimeError(
                "unscale_() comes after step(): unscale, then step, then update. "
                + _START_AFRESH
            )
        if stage and not are_true:
            raise RuntimeError(
                "unscale_() was called twice for this optimizer since the last "
                "update(): the gradients would be divided by the scale twice. "
                + _START_AFRESH
            )

    def note_unscaled(self, optimizer: Optimizer, grads: Any, finite: mx.array) -> None:
        """Note that ``unscale_`` was given gradients, and whether they were finite."""
        given = tuple(weakref.ref(x) for x in arrays(grads) if is_floating(x))
        self._by_id[id(optimizer)] = Stage(optimizer, finite, given=given)

    def check_step(self, optimizer: Optimizer, grads: Any, are_true: bool) -> None:
        """Raise if an optimizer cannot be stepped now, or not with these gradients."""
        stage = self.of(optimizer)
        if stage and stage.stepped:
            raise RuntimeError(
                "step() was called twice for this optimizer since the last update(): "
                "call update() once at the end of each iteration. Inside mx.compile, "
                "call it in the same function. " + _START_AFRESH
            )
        if stage and not are_true and stage.was_given_any_of(grads):
            raise RuntimeError(
                "These are the gradients that unscale_() was given, still scaled. "
                "MLX arrays do not change in place: pass on what unscale_() returned."
            )

    def stepped(
        self, optimizer: Optimizer, applied: mx.array, model: nn.Module | None
    ) -> tuple[Any, Any, Stage]:
        """Return what to write, as (container, key, value), once a step is done."""
        whose = weakref.ref(model) if model is not None else None
        stage = Stage(optimizer, applied, stepped=True, model=whose)
        return self._by_id, id(optimizer), stage

    def applied(self) -> list[mx.array]:
        """Return, for each step, whether it was applied."""
        return [stage.finite for stage in self._by_id.values() if stage.stepped]

    def unscaled_finite(self) -> mx.array | None:
        """Return whether all was finite that was unscaled and not stepped, if any."""
        flags = [stage.finite for stage in self._by_id.values() if not stage.stepped]
        return reduce(mx.logical_and, flags) if flags else None

    def clear(self) -> None:
        """End the iteration."""
        self._was_cut_short = False
        self._by_id.clear()
