"""``GradScaler``: PyTorch's object, on MLX trees, without a host sync."""

import os
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.optimizers import Optimizer
from mlx.utils import tree_map

from . import distributed, files, precision
from .distributed.agreement import compare_scalers
from .distributed.decision import agreed
from .finite import all_finite, all_finite_times, arrays, is_floating
from .guard import guarded_apply, unscale
from .half import HALF
from .scale import (
    FIELDS,
    LARGEST_SCALE,
    SETTINGS,
    SMALLEST_SCALE,
    as_array,
    check,
    check_scale,
    count_step,
    next_scale,
    read,
    read_field,
    within_limits,
)
from .state_dict import from_state_dict, to_state_dict
from .twice import scaled_once, watched


@dataclass
class _Record:
    """What happened with one optimizer since the last ``update()``."""

    optimizer: Optimizer
    finite: mx.array
    stepped: bool = False
    # The scaled leaves that unscale_() was given, without keeping them alive.
    scaled: tuple[weakref.ref, ...] = ()

    def was_given(self, grads: Any) -> bool:
        given = {id(ref()) for ref in self.scaled if ref() is not None}
        return any(id(x) in given for x in arrays(grads))


class GradScaler:
    """Scale losses so that float16 gradients neither underflow nor overflow.

    The scale, every counter and every setting live in :attr:`state`, a dict of
    0-d arrays. List it in ``mx.compile`` and the whole training step, skipped
    updates included, is one compiled function that never waits for the device.

    Args:
        init_scale (float): The first loss scale. Default: ``65536.0``.
        growth_factor (float): Multiplies the scale after ``growth_interval``
            finite steps in a row. Default: ``2.0``.
        backoff_factor (float): Multiplies the scale after an overflow.
            Default: ``0.5``.
        growth_interval (int): Default: ``2000``.
        enabled (bool): If False, every method passes through. Default: ``True``.
        backoff_interval (int): How many overflows in a row it takes to back off.
            Default: ``1``.
        dynamic (bool): If False the scale stays; a step that overflows is still
            skipped. Default: ``True``.
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

    def __init__(
        self,
        init_scale: float = 65536.0,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        *,
        backoff_interval: int = 1,
        dynamic: bool = True,
        min_scale: float = SMALLEST_SCALE,
        max_scale: float = LARGEST_SCALE,
        group: mx.distributed.Group | None = None,
    ):
        if not isinstance(enabled, bool):
            raise TypeError(f"enabled must be True or False, got {enabled!r}.")
        values = {
            "scale": init_scale,
            "growth_factor": growth_factor,
            "backoff_factor": backoff_factor,
            "growth_interval": growth_interval,
            "backoff_interval": backoff_interval,
            "dynamic": dynamic,
            "min_scale": min_scale,
            "max_scale": max_scale,
        }
        check(values)
        self._enabled = enabled
        self._group = group
        self._state: dict[str, mx.array] = {}
        self._forget_iteration()
        values = {name: values.get(name, FIELDS[name][1]) for name in FIELDS}
        compare_scalers("GradScaler()", self, values)
        self._fill(values)

    def _forget_iteration(self) -> None:
        # By id, because an optimizer may define equality. The record keeps it.
        self._records: dict[int, _Record] = {}
        self._scale_was_applied = False
        self._owner: weakref.ref | None = None
        self._warned: set[str] = set()

    def _fill(self, values: dict[str, Any]) -> None:
        for name, value in values.items():
            self._state[name] = as_array(name, value)
        # Evaluated here: an array made on one thread cannot be on another.
        mx.eval(self._state)

    @property
    def state(self) -> dict[str, mx.array]:
        """The dict of arrays to list in ``mx.compile(inputs=..., outputs=...)``."""
        return self._state

    # The loss

    def scale(self, outputs: Any) -> Any:
        """Return an array, or each array of a tree, times the scale in float32.

        Example:
            >>> import mlx.core as mx
            >>> from mlx_gradscale import GradScaler
            >>> GradScaler(init_scale=8.0).scale({"loss": mx.array(0.5)})
            {'loss': array(4, dtype=float32)}
        """
        if not self._enabled:
            return outputs
        arrays(outputs)
        self._scale_was_applied = True

        def scaled(x: mx.array) -> mx.array:
            x = self._see_loss(x)
            real = not mx.issubdtype(x.dtype, mx.complexfloating)
            return (x.astype(mx.float32) if real else x) * self._state["scale"]

        return tree_map(scaled, outputs)

    def scale_loss(self, loss_fn: Callable) -> Callable:
        """Return ``loss_fn`` with the same value and a scaled gradient.

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
        if not callable(loss_fn):
            raise TypeError(
                "scale_loss() takes the function that computes the loss, not its "
                "value, which scale() takes."
            )
        if not self._enabled:
            return loss_fn
        self._scale_was_applied = True
        return precision.with_scaled_gradient(
            watched(loss_fn), lambda: self._state["scale"], self._see_loss
        )

    def value_and_grad(
        self,
        model: nn.Module,
        loss_fn: Callable,
        compute_dtype: mx.Dtype | None = None,
        *,
        keep: Callable[[str, mx.array], bool] | None = None,
        cast_inputs: bool = True,
    ) -> Callable:
        """Like ``nn.value_and_grad``: the true loss, and scaled gradients.

        Args:
            model (nn.Module): The model to differentiate.
            loss_fn (Callable): Returns a scalar loss, or a tuple whose first
                element is the loss.
            compute_dtype (Dtype, optional): Cast floating trainable parameters and
                floating arguments to this for the forward pass. Gradients come
                back in the parameters' own dtype, and the model keeps its own
                parameters. Default: ``None``.
            keep (Callable, optional): With ``compute_dtype``: told the path and
                the value of a parameter, returns True to leave it as it is.
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
            (array([1024], dtype=float32), mlx.core.float32)
        """
        if not isinstance(model, nn.Module):
            raise TypeError(
                "value_and_grad(model, loss_fn) takes a model first, got "
                f"{type(model).__name__}. For a tree of parameters use "
                "mx.value_and_grad(scaler.scale_loss(loss_fn))."
            )
        loss_fn = self.scale_loss(loss_fn)
        if compute_dtype is None:
            if keep is not None or not cast_inputs:
                raise ValueError(
                    "keep= and cast_inputs= have no meaning without compute_dtype=."
                )
            return nn.value_and_grad(model, loss_fn)
        return precision.value_and_grad(
            model, loss_fn, compute_dtype, keep, cast_inputs
        )

    def _see_loss(self, loss: mx.array) -> mx.array:
        if loss.dtype == mx.float16:
            self._warn_once(
                "The loss is float16, so its gradient starts at the scale cast to "
                "float16, where everything above 65504 is inf: steps are skipped "
                "until the scale is below that. Reduce the loss in float32, for "
                "example with logits.astype(mx.float32)."
            )
        return scaled_once(loss)

    def _warn_once(self, message: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            warnings.warn(message, stacklevel=3)

    # The step

    def unscale_(self, optimizer: Optimizer, grads: Any) -> Any:
        """Return the gradients divided by the scale, in float32.

        For clipping or inspecting them before :meth:`step`, which then takes the
        returned tree. Leaves that are not floating pass through.

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
        self._check_optimizer(optimizer, "unscale_")
        record = self._records.get(id(optimizer))
        if record and record.stepped:
            raise RuntimeError(
                "unscale_() comes after step(): unscale, then step, then update."
            )
        if record:
            raise RuntimeError(
                "unscale_() was called twice for this optimizer since the last "
                "update(): the gradients would be divided by the scale twice. After "
                "an iteration that failed halfway, update(new_scale) starts afresh."
            )
        inverse = self._inverse()
        # This rank's own: step() or update() asks the others, once.
        finite = all_finite_times(grads, inverse)
        scaled = tuple(weakref.ref(x) for x in arrays(grads) if is_floating(x))
        self._records[id(optimizer)] = _Record(optimizer, finite, scaled=scaled)
        return unscale(grads, inverse)

    def step(self, optimizer: Optimizer, model: nn.Module, grads: Any) -> mx.array:
        """Update model and optimizer if all gradients are finite, else nothing.

        Args:
            optimizer (Optimizer): Any optimizer of ``mlx.optimizers``.
            model (nn.Module): The model to update.
            grads (Any): The scaled gradients, or what :meth:`unscale_` returned.

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
        model.update(self.apply_gradients(optimizer, grads, model))
        return self.last_step_applied

    def apply_gradients(self, optimizer: Optimizer, grads: Any, parameters: Any) -> Any:
        """Return the parameters after a guarded step, as :meth:`step` does it.

        Args:
            optimizer (Optimizer): Any optimizer of ``mlx.optimizers``.
            grads (Any): The scaled gradients, or what :meth:`unscale_` returned.
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
        self._check_optimizer(optimizer, "step")
        record = self._records.get(id(optimizer))
        if record and record.stepped:
            raise RuntimeError(
                "step() was called twice for this optimizer since the last update(): "
                "call update() once at the end of each iteration. Inside mx.compile, "
                "call it in the same function."
            )
        if record and record.was_given(grads):
            raise RuntimeError(
                "These are the gradients that unscale_() was given, still scaled. "
                "MLX arrays do not change in place: pass on what unscale_() returned."
            )
        if record:
            inverse = mx.array(1.0)
            finite = record.finite & all_finite(grads)
        else:
            inverse = self._inverse()
            finite = all_finite_times(grads, inverse)
        finite = agreed(finite, self._group)
        new = guarded_apply(optimizer, grads, parameters, inverse, finite)
        self._remember(grads)
        self._warn_about_half(new)
        self._records[id(optimizer)] = _Record(optimizer, finite, stepped=True)
        self._count(finite)
        return new

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
            self._state["scale"] = within_limits(self._state, _as_scale(new_scale))
        elif self._records:
            records = self._records.values()
            finite = [record.finite for record in records if record.stepped]
            unscaled = [record.finite for record in records if not record.stepped]
            if unscaled:
                finite.append(agreed(reduce(mx.logical_and, unscaled), self._group))
            self._move(reduce(mx.logical_and, finite))
        else:
            raise RuntimeError(
                "update() found nothing recorded: call step() or unscale_() first. "
                "If step() runs inside mx.compile, call update() in there too."
            )
        self._records.clear()

    def minimize(self, optimizer: Optimizer, model: nn.Module, grads: Any) -> mx.array:
        """Do :meth:`step` and :meth:`update`; return what ``step`` returns.

        For one optimizer. With several, whose gradients came with the same scale, call
        :meth:`step` for each and :meth:`update` once.
        """
        applied = self.step(optimizer, model, grads)
        self.update()
        return applied

    def _remember(self, grads: Any) -> None:
        if alarm := getattr(self, "skip_alarm", None):
            alarm.remember(grads)

    def _count(self, applied: mx.array) -> None:
        self._state.update(count_step(self._state, applied))

    def _move(self, finite: mx.array) -> None:
        self._state.update(next_scale(self._state, finite))

    def _inverse(self) -> mx.array:
        return 1.0 / self._state["scale"] if self._enabled else mx.array(1.0)

    def _check_optimizer(self, optimizer: Optimizer, caller: str) -> None:
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
        if not self._scale_was_applied:
            raise RuntimeError(
                f"{caller}() was called, but this scaler never scaled a loss. Get the "
                "gradients from value_and_grad(), scale_loss() or scale() first."
            )

    def _warn_about_half(self, parameters: Any) -> None:
        if any(x.dtype in HALF for x in arrays(parameters)):
            self._warn_once(
                "Some parameters are float16 or bfloat16 and have no float32 master: "
                "updates smaller than half a unit in their last place are lost. Keep "
                "float32 parameters and use value_and_grad(..., compute_dtype), or use "
                "LossScaleOptimizer."
            )

    # Settings

    def get_scale(self) -> float:
        """Read the scale from the device; 1.0 when disabled.

        This is also where too many skipped steps in a row are noticed: see
        :class:`mlx_gradscale.diagnostics.SkipAlarm`, or set ``skip_alarm`` to None.
        """
        if not self._enabled:
            return 1.0
        # Here, because diagnostics reads scalers: it comes after this file.
        from .diagnostics import check_skips

        check_skips(self)
        return self._state["scale"].item()

    def is_enabled(self) -> bool:
        """Tell whether the scaler does anything."""
        return self._enabled

    def get_growth_factor(self) -> float:
        """Read the growth factor."""
        return self._get("growth_factor")

    def set_growth_factor(self, new_factor: float) -> None:
        """Set the growth factor, also for a step that is already compiled.

        Example:
            >>> from mlx_gradscale import GradScaler
            >>> scaler = GradScaler()
            >>> scaler.set_growth_factor(1.5)
            >>> scaler.get_growth_factor()
            1.5
        """
        self._set("growth_factor", new_factor)

    def get_backoff_factor(self) -> float:
        """Read the backoff factor."""
        return self._get("backoff_factor")

    def set_backoff_factor(self, new_factor: float) -> None:
        """Set the backoff factor, also for a step that is already compiled."""
        self._set("backoff_factor", new_factor)

    def get_growth_interval(self) -> int:
        """Read the growth interval."""
        return self._get("growth_interval")

    def set_growth_interval(self, new_interval: int) -> None:
        """Set the growth interval, also for a step that is already compiled."""
        self._set("growth_interval", new_interval)

    def _get(self, name: str) -> Any:
        return read_field(name, self._state[name])

    def _set(self, name: str, value: Any) -> None:
        check({name: value})
        self._state[name] = as_array(name, value)

    @property
    def skipped_steps(self) -> mx.array:
        """How many steps changed nothing, as a lazy 0-d array."""
        return self._state["skipped_steps"]

    @property
    def consecutive_skips(self) -> mx.array:
        """How many of the latest updates in a row had a skipped step, lazily.

        Example:
            >>> from mlx_gradscale import GradScaler
            >>> GradScaler().consecutive_skips
            array(0, dtype=int32)
        """
        return self._state["consecutive_skips"]

    @property
    def last_step_applied(self) -> mx.array:
        """Whether the latest step changed something, lazily."""
        return self._state["last_step_applied"]

    def assert_in_sync(self, group: mx.distributed.Group | None = None) -> None:
        """Raise, on every rank, if this scaler is not in the same state on all.

        See :func:`mlx_gradscale.distributed.assert_in_sync`, which says which rank
        differs in what.

        Args:
            group (mx.distributed.Group, optional): Default: the scaler's own group,
                else the global one.
        """
        distributed.assert_in_sync(self._state, group or self._group)

    # Saving

    def state_dict(self) -> dict[str, Any]:
        """Return PyTorch's five keys, and others only where not at their default.

        Example:
            >>> from mlx_gradscale import GradScaler
            >>> GradScaler(growth_factor=1.5).state_dict()["growth_factor"]
            1.5
        """
        if not self._enabled:
            return {}
        return to_state_dict(read(self._state))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a state dict of this class or of PyTorch's, or raise.

        Trackers and tallies that the dict does not have start at zero; settings of
        this package that it does not have stay as they were constructed. A scale
        beyond 2**-64 or 2**64, as PyTorch can have, is brought to the nearer. Other
        keys are ignored. Nothing is changed if anything is wrong.

        Example:
            >>> from mlx_gradscale import GradScaler
            >>> scaler = GradScaler()
            >>> scaler.load_state_dict(GradScaler(init_scale=512.0).state_dict())
            >>> scaler.get_scale()
            512.0
        """
        if not self._enabled:
            return
        settings = {name: self._get(name) for name in SETTINGS}
        values = from_state_dict(state_dict, settings)
        compare_scalers("load_state_dict()", self, values)
        self._fill(values)

    def save(self, path: str | os.PathLike) -> None:
        """Write the state dict to one file, atomically.

        Args:
            path (str): Ends in ``.json``, ``.safetensors`` or ``.pt``; ``.json.gz``
                and ``.pt.gz`` are compressed.

        Example:
            >>> import os, tempfile
            >>> from mlx_gradscale import GradScaler
            >>> path = os.path.join(tempfile.mkdtemp(), "scaler.pt")
            >>> GradScaler(init_scale=512.0).save(path)
            >>> scaler = GradScaler()
            >>> scaler.load(path)
            >>> scaler.get_scale()
            512.0
        """
        files.save_state(path, self.state_dict())

    def load(self, path: str | os.PathLike) -> None:
        """Load what :meth:`save` wrote, or a scaler state that PyTorch saved."""
        self.load_state_dict(files.load_state(path))

    def __getstate__(self) -> dict[str, Any]:
        if self._records:
            raise RuntimeError(
                "A GradScaler can be pickled or copied only between iterations: call "
                "update() first."
            )
        if self._group is not None:
            raise TypeError(
                "A GradScaler with a group cannot be pickled or copied: save its "
                "state_dict() and make a new one with the group."
            )
        return vars(self) | {"_state": read(self._state), "_owner": None}

    def __setstate__(self, pickled: dict[str, Any]) -> None:
        vars(self).update(pickled, _state={})
        self._forget_iteration()
        self._fill(pickled["_state"])


def is_wrapped(optimizer: Optimizer) -> bool:
    """Tell whether a ``LossScaleOptimizer`` is in there, to any depth."""
    inside = getattr(optimizer, "optimizers", [])
    scaler = getattr(optimizer, "scaler", None)
    return isinstance(scaler, GradScaler) or any(map(is_wrapped, inside))


def _as_scale(value: Any) -> mx.array:
    if isinstance(value, mx.array):
        if value.ndim or value.dtype == mx.bool_:
            raise ValueError(f"new_scale must be one number, got {value!r}.")
        return value.astype(mx.float32)
    check_scale("new_scale", value)
    return mx.array(float(value), mx.float32)
