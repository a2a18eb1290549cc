"""Do all ranks train the same: parameters, settings and the scale."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from ..files.text import dtype_name
from ..finite import is_floating
from ..scale import as_array, read
from ..tracing import evaluate_unless_traced
from .consensus import is_alone
from .exchange import check_equal

_ADVICE = (
    "Make model, optimizer and scaler alike on all ranks, and load a state on all or "
    "on none: from_rank_0() hands out what rank 0 has."
)


class _Agreed(threading.local):
    already = False


_agreed = _Agreed()


@contextmanager
def agreed_already() -> Iterator[None]:
    """Compare nothing in here: the ranks have agreed, or do so afterwards."""
    before, _agreed.already = _agreed.already, True
    try:
        yield
    finally:
        _agreed.already = before


def compare_optimizers(call: str, optimizer: Any, arrays: Any) -> None:
    """Raise, on every rank, if their ``LossScaleOptimizer`` are not to train together.

    With ``average`` that is one table of names, shapes and dtypes, the scaler's state
    and the settings; shards may differ, and the optimizers that step them. Nothing is
    sent inside of ``mx.compile``, where the scale cannot be read.

    Args:
        call (str): What the user called, for the errors.
        optimizer (LossScaleOptimizer): This rank's.
        arrays (Any): The parameters, or the state that is about to be loaded.
    """
    everyone: Any = optimizer._group if optimizer.average else None
    deciders = optimizer._deciders
    leaves = dict(tree_flatten(arrays))
    if _agreed.already or (is_alone(everyone) and is_alone(deciders)):
        return
    # One leaf of what is given will do: all are traced or none.
    if not evaluate_unless_traced(optimizer.scaler.state, list(leaves.values())[:1]):
        return
    state = {
        name: leaves.get(f"scaler.{name}", x)
        for name, x in optimizer.scaler.state.items()
    }
    shared = _scaler_table(optimizer.scaler, state) | {
        "max_grad_norm": str(optimizer.max_grad_norm)
    }
    if not is_alone(everyone):
        own = {f"optimizer.{p}": x for p, x in tree_flatten(optimizer.optimizer.state)}
        whole = {
            **_kinds(leaves, optimizer._sharded),
            **_numbers(own | leaves),
            "average": optimizer.average,
            "masters": "remainder" if optimizer._keeps_remainders else "float32",
            "optimizer": type(optimizer.optimizer).__name__,
        }
        check_equal(call, whole | shared, everyone, _text, _ADVICE)
    if not is_alone(deciders) and deciders is not everyone:
        check_equal(call, shared, deciders, _text, _ADVICE)


def compare_scalers(call: str, scaler: Any, values: dict[str, Any]) -> None:
    """Raise, on every rank, if their ``GradScaler`` are not to have the same state.

    Args:
        call (str): What the user called, for the errors.
        scaler (GradScaler): This rank's, with a group or in an optimizer with one.
        values (dict): The state that it is about to have, as Python numbers.
    """
    owner = scaler._owner and scaler._owner()
    group = scaler._group or (owner and owner._group)
    if not _agreed.already and not is_alone(group):
        state = {name: as_array(name, value) for name, value in values.items()}
        check_equal(call, _scaler_table(scaler, state), group, _text, _ADVICE)


def _scaler_table(scaler: Any, state: dict[str, mx.array]) -> dict[str, str]:
    numbers = {f"scaler.{name}": str(x) for name, x in read(state).items()}
    return numbers | {"scaler.enabled": str(scaler.is_enabled())}


def _numbers(leaves: dict[str, Any]) -> dict[str, str]:
    # Step and learning rate; of a MultiOptimizer those of each part.
    return {
        path: str(x.item())
        for path, x in leaves.items()
        if path.startswith("optimizer.") and isinstance(x, mx.array) and x.ndim == 0
    }


def _kinds(leaves: dict[str, mx.array], sharded: Any) -> dict[str, str]:
    if sharded and "scaler.scale" in leaves:
        # A saved state has other paths than the parameters that sharded() is told.
        return {}
    return {
        path: f"{dtype_name(x)}{list(x.shape)}"
        for path, x in leaves.items()
        if isinstance(x, mx.array)
        and is_floating(x)
        and not (sharded and sharded(path, x))
    }


def _text(entry: str | None) -> str:
    return "nothing of this name" if entry is None else entry
