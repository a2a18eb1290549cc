"""Does a saved run fit a live one: what does not is named, before anything changes."""

import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.optimizers import Optimizer

from ..files.text import dtype_name, printable
from ..finite import is_floating
from ..optimizer import LossScaleOptimizer
from ..optimizer_state import check_loaded
from ..run_folder.settings import settings
from ..scaler import GradScaler
from .checksum import checksum
from .memory_order import arranged
from .weights import statistics, weights

Flat = Mapping[str, Any]
_LISTED = 4
_FLOATING = {name: getattr(mx, name) for name in ("float32", "float16", "bfloat16")}


def fitting_weights(
    resume: Flat, saved: Flat, model: nn.Module
) -> tuple[dict[str, mx.array], dict[str, mx.array]]:
    """Return the model's new weights, and those of them that have a wider original."""
    own, moving = weights(model), statistics(model)
    frozen, exact, lie = resume["frozen"], resume["exact"], resume["strides"]["model"]
    check_names("the model", own, {**saved, **frozen})
    new = {}
    for name, x in saved.items():
        dtype, to = resume["dtypes"][name], own[name].dtype
        if name in moving and dtype in _FLOATING:
            # It is in the precision of what the layer was given last.
            to = _FLOATING[dtype]
            check_kind(name, own[name].astype(to), x.shape, dtype)
        else:
            check_kind(name, own[name], x.shape, dtype)
        new[name] = x.astype(to)
    for name, (dtype, shape, known) in frozen.items():
        check_kind(name, own[name], tuple(shape), dtype)
        if checksum(own[name]) != known:
            raise ValueError(
                f"{short(name)} is frozen and was not saved, and the model has other "
                "values than when it was: load the same base model first."
            )
    for name, x in exact.items():
        check_kind(name, new[name], x.shape, dtype_name(x))
    new = {name: arranged(x, lie.get(name)) for name, x in (new | exact).items()}
    wider = {name: x for name, x in saved.items() if x.dtype != new[name].dtype}
    mx.eval(new)
    return new, wider


def check_names(whose: str, own: Iterable[str], saved: Iterable[str]) -> None:
    """Raise unless both have the same names."""
    own, saved = set(own), set(saved)
    lacks = sorted(saved - own), sorted(own - saved)
    said = [
        f"{who} has no {', '.join(map(short, names[:_LISTED]))}"
        + (f" and {len(names) - _LISTED} more" if names[_LISTED:] else "")
        for who, names in zip((whose, "the checkpoint"), lacks, strict=True)
        if names
    ]
    if said:
        raise ValueError(
            f"It is of another model or optimizer: {'; '.join(said)}. Build them, and "
            "freeze layers, as they were."
        )


def check_kind(name: str, own: mx.array, shape: tuple[int, ...], dtype: str) -> None:
    """Raise unless an array here has the saved shape and dtype."""
    if (own.shape, dtype_name(own)) != (shape, dtype):
        raise ValueError(
            f"{short(name)} is {short(dtype)} of shape {shape} in the checkpoint, "
            f"{dtype_name(own)} of shape {own.shape} here."
        )


def check_moment(path: str, here: mx.array, there: mx.array) -> None:
    """Raise unless a moment fits; floating ones may differ in precision."""
    # MLX's optimizers change the precision of their state in the first steps.
    same = here.dtype == there.dtype or (is_floating(here) and is_floating(there))
    if here.shape != there.shape or not same:
        check_kind(path, here, there.shape, dtype_name(there))


def check_scaler(resume: Flat, scaler: GradScaler | None) -> None:
    """Raise unless the saved scaler's state fits the one that is given."""
    saved = resume["scaler"]
    if saved is None and scaler is None:
        return
    if scaler is None:
        raise ValueError("It holds a GradScaler's state: give the scaler too.")
    if saved is None:
        raise ValueError("It holds no GradScaler's state: leave out the scaler.")
    if scaler.is_enabled() != resume["enabled"]:
        was = "enabled" if resume["enabled"] else "not enabled"
        raise ValueError(f"The saved scaler was {was}: build this one so too.")
    check_loaded({f"scaler.{name}": x for name, x in saved.items()}, scaler.state)


def check_settings(resume: Flat, optimizer: Optimizer) -> None:
    """Raise unless the optimizer is built as the saved one; warn of schedules."""
    inner = optimizer
    if isinstance(optimizer, LossScaleOptimizer):
        inner = optimizer.optimizer
    if (inner is not optimizer) != resume["wrapped"]:
        there, here = ("", " not") if resume["wrapped"] else (" not", "")
        raise ValueError(
            f"The saved optimizer was{there} a LossScaleOptimizer, this one is{here}."
        )
    saved = resume["settings"]
    own = settings(inner)
    was, now = ([part["class"] for part in s] for s in (saved, own))
    if was != now:
        raise ValueError(
            f"The saved optimizer was {short(', '.join(was))}, this is "
            f"{', '.join(now)}."
        )
    for old, new in zip(saved, own, strict=True):
        for name in [n for n in new["values"] if n in old["values"]]:
            was, now = old["values"][name], new["values"][name]
            if was != now:
                raise ValueError(
                    f"The saved {new['class']} had {name}={short(was)}, this one has "
                    f"{now!r}. To go on with another value, restore first and set it "
                    "then."
                )
        if old["schedules"] != new["schedules"]:
            had = short(", ".join(old["schedules"]) or "nothing")
            _warn(
                f"The saved {new['class']} had a schedule for {had}, this one for "
                f"{', '.join(new['schedules']) or 'nothing'}: schedules are not saved."
            )
    norm = getattr(optimizer, "max_grad_norm", None)
    if norm != resume["max_grad_norm"]:
        _warn(f"max_grad_norm was {short(resume['max_grad_norm'])}, and is {norm} now.")


def _warn(text: str) -> None:
    warnings.warn(text, stacklevel=5)


def short(value: Any) -> str:
    """Return a value as text for an error: printable, at most 80 characters."""
    text = printable(value if isinstance(value, str) else repr(value))
    return text if len(text) <= 80 else f"{text[:77]}..."
