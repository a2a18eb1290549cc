"""True gradients of a scaled loss, and what a step has to know of the forward pass."""

import weakref
from collections.abc import Callable
from contextlib import ExitStack
from functools import wraps
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn

from ..finite import all_finite, is_finite_magnitude
from ..islands import float32_gradients
from ..state_tree import leaves_of, write_all
from ..tracing import have_values, is_traced
from . import buffers, differentiation
from .double_scaling import watched
from .dtypes import warned_once

_COMPILED_WITHOUT = (
    "A gradient function was compiled without the scaler's state, so that it goes on "
    "with the scale of its first call, whatever update() does: list scaler.state, or "
    "the LossScaleOptimizer's state, in mx.compile(inputs=..., outputs=...)."
)


class Forward:
    """The forward passes of one scaler.

    Whether a loss was finite and what buffers were before goes into the state, because
    the forward pass and the step may be in different traces, and a step may have
    several forward passes.

    Args:
        state (dict): The scaler's.
        check_loss (Callable): Is given each loss as it comes out of the user's
            function, and returns it.
        begin (Callable): Is given each model that is about to be differentiated.
        warn (Callable): Is given what the user should know, once.
    """

    def __init__(
        self,
        state: dict[str, Any],
        check_loss: Callable[[mx.array], mx.array],
        begin: Callable[[nn.Module], None] = lambda model: None,
        warn: Callable[[str], None] = lambda sentence: None,
    ):
        self._state = state
        self._check_loss = check_loss
        self._begin = begin
        self._warn = warn
        self._models: list[weakref.ref[nn.Module]] = []
        self._passes: list[differentiation.Passes] = []
        self._unsettled = False

    def value_and_grad(
        self, model: nn.Module, loss_fn: Callable[..., Any], *arguments: Any
    ) -> Callable[..., Any]:
        """Return a function of the true loss and the true gradients, in float32.

        Args:
            model (nn.Module): The model to differentiate.
            loss_fn (Callable): As for ``nn.value_and_grad``.
            *arguments (Any): The rest of :func:`differentiation.value_and_grad`'s.
        """
        self._register(model)
        warned = warned_once(loss_fn, lambda args, kwargs: [model], self._warn)
        before: buffers.Places = {}
        is_compiled = False

        def look(found: list[differentiation.Found], trained: set[int]) -> None:
            nonlocal before, is_compiled
            before = buffers.untrained(found, trained)
            first = [x for *_, x in found if id(x) in trained][:1]
            is_compiled = any(map(is_traced, first))

        differentiate = differentiation.value_and_grad(
            model, self.scaled_loss(warned), *arguments, look=look
        )

        @wraps(loss_fn)
        def value_and_grad_fn(*args: Any, **kwargs: Any) -> Any:
            nonlocal before
            self._begin(model)
            inverse = 1.0 / self._state["scale"]
            is_listed = self._is_listed()
            given = differentiation.arrays_among((args, kwargs))
            is_given = not is_listed and any(map(is_traced, given))
            value, gradients = differentiate(*args, **kwargs)
            # Not kept beyond this call: what is held cannot be written over.
            old, before = before, {}
            # Compiled, but without the state: nothing may be written to it.
            elsewhere = not is_listed and (is_given or is_compiled)
            if elsewhere:
                self._warn(_COMPILED_WITHOUT)
            loss = value[0] if isinstance(value, tuple) else value
            if elsewhere:
                self._take_back_now(model, old, loss, gradients)
            else:
                self._note_loss(loss)
                self._note_buffers(model, old)
            return value, differentiation.true_gradients(gradients, inverse)

        differentiation.mark_scaled(value_and_grad_fn)
        return value_and_grad_fn

    def scale_loss(
        self, loss_fn: Callable[..., Any], model: nn.Module | None = None
    ) -> Callable[..., Any]:
        """Return ``loss_fn`` with the same value, for somebody else to differentiate.

        The loss is scaled, and the gradients of the model's parameters are unscaled
        on their way out, in float32.

        Args:
            loss_fn (Callable): As for ``nn.value_and_grad``.
            model (nn.Module, optional): Default: the models among the arguments.
        """
        differentiation.refuse_scaled(loss_fn)
        if model is not None:
            self._register(model)

        def models_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[nn.Module]:
            return [model] if model else differentiation.models_among((args, kwargs))

        warned = warned_once(loss_fn, models_of, self._warn)

        @wraps(loss_fn)
        def true_loss_fn(*args: Any, **kwargs: Any) -> Any:
            models = models_of(args, kwargs)
            if not models:
                raise TypeError(
                    "There is no model among the arguments of the loss function, so "
                    "that its gradients could not be unscaled: name it, as "
                    "scale_loss(loss_fn, model)."
                )
            scale = self._state["scale"]
            inverse = 1.0 / scale
            before = [buffers.places(each) for each in models]
            # Whether it is compiled without the state cannot be told in here, where
            # it is differentiated: check_passes() looks at what was left.
            self._unsettled = not self._is_listed()
            passes = differentiation.Passes()
            noted_loss_fn = differentiation.with_loss(
                watched(warned), lambda loss: self._scale_and_note(loss, passes)
            )
            with ExitStack() as stack:
                stack.enter_context(float32_gradients())
                for each in models:
                    stack.enter_context(
                        differentiation.unscaled_gradients(each, inverse, passes)
                    )
                outputs = noted_loss_fn(*args, **kwargs)
            for each, places in zip(models, before, strict=True):
                self._note_buffers(each, places)
            return outputs

        differentiation.mark_scaled(true_loss_fn)
        return true_loss_fn

    def scaled_loss(self, loss_fn: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``loss_fn`` with the same value and a gradient that stays scaled."""
        return differentiation.with_scaled_gradient(
            loss_fn, lambda: self._state["scale"], self._check_loss, watched
        )

    def knows(self, model: nn.Module) -> bool:
        """Tell whether gradients of this model, or of one around it, came from here."""
        wholes = [known() for known in self._models]
        return any(whole is not None and _holds(whole, model) for whole in wholes)

    def taken_back(
        self, model: nn.Module, applied: mx.array
    ) -> list[tuple[Any, Any, Any]]:
        """Return what to write so that a skipped step leaves the model's buffers."""
        backups = self._state.get("buffers", {})
        writes = []
        for i, known in enumerate(self._models):
            whole = known()
            backup = backups.get(str(i))
            # Also of the whole of which this model is a part.
            if backup and whole is not None and _holds(whole, model):
                writes += buffers.taken_back(backup, whole, applied)
        return writes

    def check_passes(self, gradients: Any) -> None:
        """Look at what the forward passes left, before a step with ``gradients``.

        Raises where gradients cannot have been unscaled, and lets go of what a function
        left that was compiled without the state.
        """
        passes, self._passes = self._passes, []
        if any(not each.unscaled for each in passes):
            raise RuntimeError(
                "A loss of scale_loss() was differentiated for something else than its "
                "model's parameters, so that the gradients came out scaled: name the "
                "model, as scale_loss(loss_fn, model); do not give the loss function "
                "parameters that it puts into the model; or use value_and_grad(model, "
                "loss_fn) of this package."
            )
        if self._unsettled and not any(map(is_traced, leaves_of(gradients)[:1])):
            self._unsettled = False
            backups = self._state.get("buffers", {})
            if not have_values(self._state["loss_finite"], *leaves_of(backups)):
                self._warn(_COMPILED_WITHOUT)
                self._state.pop("buffers", None)
                self._state["loss_finite"] = mx.array(True)

    def forget(self) -> None:
        """Let go of what forward passes left that no step has seen."""
        self._state["loss_finite"] = mx.array(True)
        for backup in self._state.get("buffers", {}).values():
            backup["pending"] = mx.array(False)

    def _is_listed(self) -> bool:
        # Of a setting, which no loss depends on: MLX forgets that an array is being
        # traced once it was part of what mx.grad differentiates.
        return is_traced(self._state["growth_interval"])

    def _register(self, model: nn.Module) -> str:
        for i, known in enumerate(self._models):
            if known() is model:
                return str(i)
        free = [i for i, known in enumerate(self._models) if known() is None]
        index = free[0] if free else len(self._models)
        self._models[index : index + 1] = [weakref.ref(model)]
        self._state.get("buffers", {}).pop(str(index), None)
        backup = buffers.empty_backup(model)
        if backup["before"]:
            self._state.setdefault("buffers", {})[str(index)] = backup
        return str(index)

    def _scale_and_note(
        self, loss: mx.array, passes: differentiation.Passes
    ) -> mx.array:
        # By whoever differentiates, so that a validation loss is not noted.
        @mx.custom_function
        def scale_gradient(loss: mx.array, scale: mx.array) -> mx.array:
            return loss

        @scale_gradient.vjp
        def scale_gradient_vjp(
            primals: list[mx.array], cotangent: mx.array, _: mx.array
        ) -> tuple[mx.array, mx.array]:
            loss, scale = primals
            self._passes.append(passes)
            self._note_loss(loss)
            return cotangent * scale, mx.zeros_like(scale)

        loss = self._check_loss(loss).astype(mx.float32)
        return cast(mx.array, scale_gradient(loss, self._state["scale"]))

    def _note_loss(self, loss: mx.array) -> None:
        finite = is_finite_magnitude(mx.abs(loss))
        self._state["loss_finite"] = self._state["loss_finite"] & finite

    def _note_buffers(self, model: nn.Module, before: buffers.Places) -> None:
        index = self._register(model)
        backup = self._state.get("buffers", {}).get(index)
        found = backup or {"pending": mx.array(False), "before": {}}
        buffers.back_up(found, before)
        if found["before"] and not backup:
            self._state.setdefault("buffers", {})[index] = found

    def _take_back_now(
        self, model: nn.Module, before: buffers.Places, loss: mx.array, gradients: Any
    ) -> None:
        # In a trace that does not list the state nothing can be left for the step.
        backup = {"pending": mx.array(False), "before": {}}
        buffers.back_up(backup, before)
        if backup["before"]:
            finite = all_finite([loss, gradients])
            write_all(buffers.taken_back(backup, model, finite))


def _holds(whole: nn.Module, part: nn.Module) -> bool:
    return whole is part or any(module is part for module in whole.modules())
