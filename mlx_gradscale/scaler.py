"""``GradScaler``: PyTorch's object, on MLX trees, without a host sync."""

import inspect
from collections.abc import Callable
from functools import reduce
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.optimizers import Optimizer
from mlx.utils import tree_map

from . import calibration, precision
from .distributed.consensus import finite_on_all_ranks, is_alone
from .finite import all_finite, all_finite_times, arrays, is_floating
from .guard import PlannedStep, fitting_parameters, planned_step, unscale
from .loss_scale import SCALED_GRADIENTS, TRUE_GRADIENTS, LossScale
from .masters import HALF
from .precision.double_scaling import is_scaled_now
from .scale import LARGEST_SCALE, SMALLEST_SCALE, check_scale, within_limits
from .stages import Stages
from .state_tree import write_all


class GradScaler(LossScale):
    """Scale losses so that float16 gradients neither underflow nor overflow.

    The scale, every counter and every setting live in :attr:`state`, a dict of
    0-d arrays. List it in ``mx.compile`` and the whole training step, skipped
    updates included, is one compiled function that never waits for the device.

    A scaler has one of two ways for life. :meth:`value_and_grad` gives true gradients,
    in float32, which anybody's code may clip, add up, average or log. :meth:`scale` and
    :meth:`scale_loss` are PyTorch's way: the gradients are scaled until
    :meth:`unscale_` or :meth:`step`. What PyTorch does in place is a value here, so in
    that way it is up to you to clip what ``unscale_`` returned and not what it was
    given, not to add up gradients from before and after an :meth:`update`, and not to
    hand them to another scaler.

    Args:
        init_scale (float): The first loss scale. Default: ``65536.0``.
        growth_factor (float): Multiplies the scale after ``growth_interval``
            finite steps in a row. Default: ``2.0``.
        backoff_factor (float): Multiplies the scale after an overflow.
            Default: ``0.5``.
        growth_interval (int): Default: ``2000``.
        enabled (bool): If False, every method passes through and nothing is guarded:
            a gradient that is NaN is applied. Default: ``True``.
        backoff_interval (int): How many overflows in a row it takes to back off, each
            time, as in Paddle. Default: ``1``.
        hysteresis (int): How many overflows it takes to back off, in a row or not;
            from then on each one does until the scale grows, as in Megatron and
            DeepSpeed. Default: ``1``.
        dynamic (bool): If False the scale stays; a step that overflows is still
            skipped. ``GradScaler(1.0, dynamic=False)`` only guards, and asks for no
            scaled loss. Default: ``True``.
        min_scale (float): The scale is never below. Default: ``2**-64``.
        max_scale (float): The scale never grows above. Default: ``2**64``.
        group (mx.distributed.Group, optional): Overflow on one member skips the
            step on all, by one all-reduce of four bytes for each step. Needed where
            gradients are sharded; averaged ones are equal already, and so is the
            decision. Every member must make its scaler, and load a state into it:
            all raise where these differ. Default: ``None``.

    Example:
        >>> import mlx.core as mx, mlx.nn as nn, mlx.optimizers as optim
        >>> from mlx_gradscale import GradScaler
        >>> model, optimizer = nn.Linear(4, 1), optim.AdamW(1e-3)
        >>> scaler = GradScaler(init_scale=1024.0)
        >>> def loss_fn(x, y):
        ...     return nn.losses.mse_loss(model(x).astype(mx.float32), y)
        >>> loss_and_grad = scaler.value_and_grad(model, loss_fn, mx.float16)
        >>> loss, grads = loss_and_grad(mx.ones((2, 4)), mx.zeros((2, 1)))
        >>> scaler.minimize(optimizer, model, grads)
        array(True, dtype=bool)
        >>> scaler.get_scale()
        1024.0
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> "GradScaler":
        # Here, because "cuda", init_scale=4.0 does not get as far as __init__. A
        # subclass with its own arguments may take what it likes.
        device = kwargs.get("device", args[0] if args else None)
        if cls.__init__ is GradScaler.__init__ and isinstance(device, str):
            raise TypeError(
                f"GradScaler takes no device: leave out {device!r}. MLX arrays live in "
                "unified memory."
            )
        return super().__new__(cls)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        _show_signature_of_init(cls)

    def __init__(
        self,
        init_scale: float = 65536.0,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        *,
        backoff_interval: int = 1,
        hysteresis: int = 1,
        dynamic: bool = True,
        min_scale: float = SMALLEST_SCALE,
        max_scale: float = LARGEST_SCALE,
        group: mx.distributed.Group | None = None,
    ):
        values = {
            "scale": init_scale,
            "growth_factor": growth_factor,
            "backoff_factor": backoff_factor,
            "growth_interval": growth_interval,
            "backoff_interval": backoff_interval,
            "hysteresis": hysteresis,
            "dynamic": dynamic,
            "min_scale": min_scale,
            "max_scale": max_scale,
        }
        super().__init__(values, enabled, group)

    def _begin_iterations(self) -> None:
        super()._begin_iterations()
        self._stages = Stages()

    def _begin_gradient(self, model: nn.Module) -> None:
        self._stages.begin(model)

    # The loss

    def value_and_grad(
        self,
        model: nn.Module,
        loss_fn: Callable[..., Any],
        compute_dtype: mx.Dtype | None = None,
        *,
        keep: Callable[[str, mx.array], bool] | None = None,
        cast_inputs: bool = True,
    ) -> Callable[..., Any]:
        """Like ``nn.value_and_grad``: the true loss and true gradients, in float32.

        The loss is scaled for the backward pass only. A gradient that is not finite
        comes out as NaN, and stays it in whatever is computed from it before
        :meth:`step`, which then changes nothing.

        Args:
            model (nn.Module): The model to differentiate.
            loss_fn (Callable): Returns a scalar loss, or a tuple whose first
                element is the loss.
            compute_dtype (Dtype, optional): Cast floating trainable parameters and
                floating arguments to this for the forward pass. The model keeps its
                own parameters. Default: ``None``.
            keep (Callable, optional): With ``compute_dtype``: told the path and
                the value of a parameter, returns True to leave it as it is. Its layer
                computes in float32 and casts what it returns back.
            cast_inputs (bool): With ``compute_dtype``: whether floating arguments of
                ``loss_fn`` are cast too. All are, targets and masks among them: a
                target of 1e5 is inf in float16. False leaves them alone, and
                ``loss_fn`` casts what the model is given. Default: ``True``.

        Example:
            >>> import mlx.core as mx, mlx.nn as nn
            >>> from mlx_gradscale import GradScaler
            >>> model = nn.Linear(2, 1)
            >>> fn = GradScaler(init_scale=1024.0).value_and_grad(
            ...     model, lambda x: model(x).astype(mx.float32).mean(), mx.float16
            ... )
            >>> loss, grads = fn(mx.ones((4, 2)))
            >>> grads["bias"], model.weight.dtype
            (array([1], dtype=float32), mlx.core.float32)
        """
        if not isinstance(model, nn.Module):
            raise TypeError(
                "value_and_grad(model, loss_fn) takes a model first, got "
                f"{type(model).__name__}. For a tree of parameters use "
                "mx.value_and_grad(scaler.scale_loss(loss_fn))."
            )
        arguments = (compute_dtype, keep, cast_inputs)
        if not self._enabled:
            return precision.value_and_grad(model, loss_fn, *arguments)
        loss_and_grad = self.forward.value_and_grad(model, loss_fn, *arguments)
        self.take_way(TRUE_GRADIENTS)
        return loss_and_grad

    def scale(self, outputs: Any) -> Any:
        """Return an array, or each array of a tree, times the scale in float32.

        PyTorch's way: what is differentiated from it is scaled, until
        :meth:`unscale_` returns it unscaled, not in place.

        Example:
            >>> import mlx.core as mx
            >>> from mlx_gradscale import GradScaler
            >>> GradScaler(init_scale=8.0).scale({"loss": mx.array(0.5)})
            {'loss': array(4, dtype=float32)}
        """
        if not self._enabled:
            return outputs
        arrays(outputs)
        self.take_way(SCALED_GRADIENTS)

        def scaled(x: mx.array) -> mx.array:
            x = self._check_loss(x)
            real = not mx.issubdtype(x.dtype, mx.complexfloating)
            x = x.astype(mx.float32) if real else x
            return is_scaled_now(x * self._state["scale"])

        return tree_map(scaled, outputs)

    def scale_loss(self, loss_fn: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``loss_fn`` with the same value and a scaled gradient.

        PyTorch's way, for parameters that are no ``nn.Module``. The gradients stay
        scaled until :meth:`unscale_` returns them unscaled, not in place.

        Args:
            loss_fn (Callable): Returns a scalar loss, or a tuple whose first
                element is the loss.

        Example:
            >>> import mlx.core as mx
            >>> from mlx_gradscale import GradScaler
            >>> square = GradScaler(init_scale=8.0).scale_loss(lambda x: x * x)
            >>> mx.value_and_grad(square)(mx.array(3.0))
            (array(9, dtype=float32), array(48, dtype=float32))
        """
        if not self._enabled:
            return loss_fn
        scaled_loss_fn = self.forward.scaled_loss(loss_fn)
        self.take_way(SCALED_GRADIENTS)
        return scaled_loss_fn

    calibrate, warm_start = calibration.calibrate, calibration.warm_start

    # The step

    def unscale_(self, optimizer: Optimizer, grads: Any) -> Any:
        """Return the gradients divided by the scale, in float32, not in place.

        For clipping or inspecting them before :meth:`step`, which then takes the
        returned tree. Leaves that are not floating pass through. After
        :meth:`value_and_grad` the gradients are true already, and come back as they
        are.

        Example:
            >>> import mlx.core as mx, mlx.optimizers as optim
            >>> from mlx_gradscale import GradScaler
            >>> scaler, optimizer = GradScaler(init_scale=8.0), optim.SGD(0.1)
            >>> scaled = {"w": scaler.scale(mx.array(0.5))}
            >>> scaler.unscale_(optimizer, scaled)
            {'w': array(0.5, dtype=float32)}
        """
        if not self._enabled:
            return grads
        self.check_optimizer(optimizer, "unscale_")
        true = self.gives_true_gradients
        self._stages.check_unscale(optimizer, true)
        inverse = self.inverse()
        # This rank's own: step() or update() asks the others, once.
        finite = all_finite(grads) if true else all_finite_times(grads, inverse)
        self._stages.note_unscaled(optimizer, grads, finite)
        return grads if true else unscale(grads, inverse)

    def step(self, optimizer: Optimizer, model: nn.Module, grads: Any) -> mx.array:
        """Update model and optimizer if all gradients are finite, else nothing.

        What the forward pass of :meth:`value_and_grad` wrote to the model, such as
        BatchNorm's running statistics, is taken back as well.

        Args:
            optimizer (Optimizer): Any optimizer of ``mlx.optimizers``.
            model (nn.Module): The model to update.
            grads (Any): The gradients of :meth:`value_and_grad`; in PyTorch's way
                scaled ones, or what :meth:`unscale_` returned.

        Returns:
            array: A lazy 0-d bool array, True where the step was applied.

        Example:
            >>> import mlx.core as mx, mlx.nn as nn, mlx.optimizers as optim
            >>> from mlx_gradscale import GradScaler
            >>> model, optimizer, scaler = nn.Linear(1, 1), optim.SGD(1.0), GradScaler()
            >>> loss_fn = scaler.value_and_grad(model, lambda x: mx.mean(model(x)))
            >>> _, grads = loss_fn(mx.array([[float("inf")]]))
            >>> scaler.step(optimizer, model, grads)
            array(False, dtype=bool)
        """
        if not isinstance(model, nn.Module):
            raise TypeError(
                "step(optimizer, model, grads) takes a model, got "
                f"{type(model).__name__}. Use apply_gradients for a parameter tree."
            )
        if not self._enabled:
            optimizer.update(model, grads)
            return self.last_step_applied
        self.check_model(model)
        plan, applied = self._plan(optimizer, grads, model, model)
        plan.writes += self.forward.taken_back(model, applied)
        plan.carry_out_on(model)
        return applied

    def apply_gradients(self, optimizer: Optimizer, grads: Any, parameters: Any) -> Any:
        """Return the parameters after a guarded step, as :meth:`step` does it.

        Args:
            optimizer (Optimizer): Any optimizer of ``mlx.optimizers``.
            grads (Any): As for :meth:`step`.
            parameters (Any): A tree of parameters, at least those with gradients.

        Returns:
            Any: The new parameters, in the structure of ``grads``.

        Example:
            >>> import mlx.core as mx, mlx.optimizers as optim
            >>> from mlx_gradscale import GradScaler
            >>> scaler, optimizer = GradScaler(init_scale=8.0), optim.SGD(0.5)
            >>> grads = {"w": scaler.scale(mx.array([1.0]))}
            >>> scaler.apply_gradients(optimizer, grads, {"w": mx.array([2.0])})
            {'w': array([1.5], dtype=float32)}
        """
        if not self._enabled:
            return optimizer.apply_gradients(grads, parameters)
        plan, _ = self._plan(optimizer, grads, parameters)
        return plan.carry_out()

    def _plan(
        self,
        optimizer: Optimizer,
        grads: Any,
        parameters: Any,
        model: nn.Module | None = None,
    ) -> tuple[PlannedStep, mx.array]:
        self.check_optimizer(optimizer, "step")
        true = self.gives_true_gradients
        self.forward.check_passes(grads)
        self._stages.check_step(optimizer, grads, true)
        if is_alone(self.group):
            check_not_empty(grads)
        inverse = None
        unscaled = self._stages.of(optimizer)
        if unscaled and unscaled.was_given_all_of(grads):
            finite = unscaled.finite
        elif unscaled or true:
            finite = all_finite(grads)
            finite = unscaled.finite & finite if unscaled else finite
        else:
            inverse = self.inverse()
            finite = all_finite_times(grads, inverse)
        loss_finite = self._state["loss_finite"]
        applied, loss_finite = finite_on_all_ranks(finite, loss_finite, self.group)
        fitting = fitting_parameters(grads, parameters)
        plan = planned_step(optimizer, grads, fitting, inverse, applied)
        self._warn_about_half(plan.new)
        plan.writes.append(self._stages.stepped(optimizer, applied, model))
        plan.writes += self.after_step(grads, applied, loss_finite, update=False)
        return plan, applied

    def update(self, new_scale: float | mx.array | None = None) -> None:
        """Move the scale on from all that was recorded since the last update.

        Args:
            new_scale (float or array, optional): Set the scale to this instead.
                It is clamped to ``min_scale`` and ``max_scale``; an array that is
                not a positive finite number leaves the scale as it is, because
                looking at it would wait for the device.

        Example:
            >>> from mlx_gradscale import GradScaler
            >>> scaler = GradScaler()
            >>> scaler.update(1024)
            >>> scaler.get_scale()
            1024.0
        """
        if not self._enabled:
            return
        if new_scale is not None:
            scale = within_limits(self._state, _as_scale(new_scale))
            self._only_guards &= not isinstance(new_scale, mx.array) and new_scale == 1
            self._state["scale"] = scale
            self.forward.forget()
        elif self._stages:
            finite = self._stages.applied()
            loss_finite = self._state["loss_finite"]
            unscaled = self._stages.unscaled_finite()
            if unscaled is not None:
                unscaled, loss_finite = finite_on_all_ranks(
                    unscaled, loss_finite, self.group
                )
                finite.append(unscaled)
            together = reduce(mx.logical_and, finite)
            write_all(self.after_update(together, loss_finite, steps=len(finite)))
        else:
            raise RuntimeError(
                "update() found nothing recorded: call step() or unscale_() first. "
                "If step() runs inside mx.compile, call update() in there too."
            )
        self._stages.clear()

    def minimize(self, optimizer: Optimizer, model: nn.Module, grads: Any) -> mx.array:
        """Do :meth:`step` and :meth:`update`; return what ``step`` returns.

        For one optimizer. With several, whose gradients came with the same scale, call
        :meth:`step` for each and :meth:`update` once.
        """
        applied = self.step(optimizer, model, grads)
        self.update()
        return applied

    def check_optimizer(self, optimizer: Optimizer, caller: str) -> None:
        """Raise if this optimizer cannot be stepped by this scaler, or not yet."""
        if not isinstance(optimizer, Optimizer):
            raise TypeError(
                f"{caller}() takes an optimizer of mlx.optimizers first, got "
                f"{type(optimizer).__name__}."
            )
        if is_wrapped(optimizer):
            raise TypeError(
                "A LossScaleOptimizer has a scaler of its own: call its update(), or "
                "give this scaler the optimizer inside it."
            )
        if self.has_no_gradients:
            raise RuntimeError(
                f"{caller}() was called, but this scaler never scaled a loss. Get the "
                "gradients from value_and_grad(), scale_loss() or scale() first. To "
                "skip bad steps without loss scaling, use GradScaler(1.0, "
                "dynamic=False)."
            )

    def _warn_about_half(self, parameters: Any) -> None:
        if any(x.dtype in HALF for x in arrays(parameters)):
            self.warn_once(
                "Some parameters are float16 or bfloat16 and have no float32 master: "
                "updates smaller than half a unit in their last place are lost. Keep "
                "float32 parameters and use value_and_grad(..., compute_dtype), or use "
                "LossScaleOptimizer."
            )

    def refuse_stages(self) -> None:
        """Raise if scaled gradients are under way in PyTorch's stages, else end these.

        For a ``LossScaleOptimizer``, which unscales and moves the scale by itself.
        """
        if self._stages and not self.gives_true_gradients:
            raise RuntimeError(
                "unscale_() or step() of this optimizer's scaler was called: the "
                "optimizer unscales by itself, and would do it twice. To clip, use "
                "max_grad_norm=."
            )
        self._stages.clear()

    @property
    def is_between_iterations(self) -> bool:
        """Whether nothing waits for :meth:`update`."""
        return not self._stages

    def __getstate__(self) -> dict[str, Any]:
        if self._stages:
            raise RuntimeError(
                "A GradScaler can be pickled or copied only between iterations: call "
                "update() first."
            )
        return super().__getstate__() | {"_stages": None}


def _show_signature_of_init(cls: Any) -> None:
    # inspect would show that of __new__, which takes everything.
    _, *parameters = inspect.signature(cls.__init__).parameters.values()
    cls.__signature__ = inspect.Signature(parameters)


_show_signature_of_init(GradScaler)


def check_not_empty(grads: Any) -> None:
    """Raise if there is no gradient at all, as PyTorch does."""
    if not any(is_floating(x) for x in arrays(grads)):
        raise ValueError(
            "There are no gradients to step with. Is every parameter frozen? Only a "
            "rank without data, in a group, may pass an empty tree."
        )


def is_wrapped(optimizer: Optimizer) -> bool:
    """Tell whether a ``LossScaleOptimizer`` is in there, to any depth."""
    inside = getattr(optimizer, "optimizers", [])
    scaler = getattr(optimizer, "scaler", None)
    return isinstance(scaler, GradScaler) or any(map(is_wrapped, inside))


def _as_scale(value: Any) -> mx.array:
    if isinstance(value, mx.array):
        if value.size != 1 or value.dtype == mx.bool_:
            raise ValueError(f"new_scale must be one number, got {value!r}.")
        return value.reshape(()).astype(mx.float32)
    check_scale("new_scale", value)
    return mx.array(float(value), mx.float32)
