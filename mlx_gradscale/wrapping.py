"""Which optimizers and scalers a ``LossScaleOptimizer`` can be made of."""

import weakref
from inspect import signature
from numbers import Real
from typing import Any

from mlx.optimizers import Optimizer

from .guard import single_optimizers
from .scaler import GradScaler, is_wrapped

# Which wrapper an optimizer is in: two would share its moments.
_wrappers: "weakref.WeakKeyDictionary[Optimizer, weakref.ref[Optimizer]]" = (
    weakref.WeakKeyDictionary()
)

# What Keras calls the arguments of its LossScaleOptimizer.
_KERAS = {
    "initial_scale": "init_scale",
    "dynamic_growth_steps": "growth_interval",
}


def check_optimizer(optimizer: Any) -> None:
    """Raise if this cannot be wrapped, or is wrapped already."""
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"Expected an optimizer of mlx.optimizers, got {optimizer!r}. Write "
            "LossScaleOptimizer(AdamW(1e-4)), for example."
        )
    if is_wrapped(optimizer):
        raise TypeError(
            "This optimizer is, or holds, a LossScaleOptimizer already: wrap only "
            "once, outermost."
        )
    for part in single_optimizers(optimizer):
        if has_wrapper(part):
            raise ValueError(
                f"This {type(part).__name__} is in another LossScaleOptimizer, and "
                "two models would share its moments: make one for each."
            )


def check_scaler(scaler: Any) -> None:
    """Raise if this is no scaler, or one that another optimizer moves."""
    if not isinstance(scaler, GradScaler):
        raise TypeError(f"scaler must be a GradScaler, got {scaler!r}.")
    if scaler.owner is not None:
        raise ValueError(
            "This scaler belongs to another LossScaleOptimizer, which moves its "
            "scale at each step: give each its own."
        )


def check_norm(max_grad_norm: Any) -> None:
    """Raise if gradients cannot be clipped to this norm."""
    is_number = isinstance(max_grad_norm, Real) and not isinstance(max_grad_norm, bool)
    if not is_number or not max_grad_norm > 0:
        raise ValueError(
            f"max_grad_norm must be a positive number, got {max_grad_norm!r}."
        )


def refuse_argument(name: str) -> None:
    """Raise for an argument of another class, saying where it belongs."""
    ours = _KERAS.get(name, name)
    if ours in signature(GradScaler).parameters:
        raise TypeError(
            f"{name} belongs to the scaler: write "
            f"LossScaleOptimizer(optimizer, GradScaler({ours}=...))."
        )
    if name == "inner_optimizer":
        raise TypeError("inner_optimizer is the first argument here, without a name.")
    raise TypeError(
        f"LossScaleOptimizer has no argument {name}. If it belongs to the "
        "optimizer inside, write LossScaleOptimizer(AdamW(..., "
        "weight_decay=0.1)), for example."
    )


def note_wrapper(wrapper: Optimizer, optimizer: Optimizer) -> None:
    """Note which wrapper an optimizer, and each in a ``MultiOptimizer``, is in."""
    for part in single_optimizers(optimizer):
        _wrappers[part] = weakref.ref(wrapper)


def forget_wrapper(optimizer: Optimizer) -> None:
    """Let an optimizer be wrapped anew."""
    for part in single_optimizers(optimizer):
        _wrappers.pop(part, None)


def has_wrapper(optimizer: Optimizer) -> bool:
    """Tell whether a ``LossScaleOptimizer`` steps this one."""
    wrapper = _wrappers.get(optimizer)
    return wrapper is not None and wrapper() is not None
