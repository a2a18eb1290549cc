"""Do all ranks train the same: parameters, settings and the scale."""

from contextlib import AbstractContextManager
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from ..files.text import dtype_name
from ..finite import is_floating
from ..scale import as_array, read
from ..scoped import Scoped
from ..tracing import evaluate_unless_traced
from .consensus import is_alone
from .exchange import check_equal

_ADVICE = (
    "Make model, optimizer and scaler alike on all ranks, and load a state on all or "
    "on none: from_rank_0() hands out what rank 0 has."
)


_agreed = Scoped("agreed", False)


def agreed_already() -> AbstractContextManager[None]:
    """Compare nothing in here: the ranks have agreed, or do so afterwards."""
    return _agreed.set_to(True)


def compare_optimizers(call: str, optimizer: Any, arrays: Any) -> None:
    """Raise, on every rank, if their ``LossScaleOptimizer`` are not to train together.

    With ``average`` that is one table of names, shapes and dtypes, the scaler's state
    and the settings; shards may differ, and the optimizers that step them. Nothing is
    sent inside ``mx.compile``, where the scale cannot be read.

    Args:
        call (str): What the user called, for the errors.
        optimizer (LossScaleOptimizer): This rank's.
        arrays (Any): The parameters, or the state that is about to be loaded.
    """
    ranks = optimizer.ranks
    everyone: Any = ranks.group if ranks.average else None
    leaves = dict(tree_flatten(arrays))
    if _agreed.get() or (is_alone(everyone) and is_alone(ranks.deciders)):
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
            **_kinds(leaves, ranks.sharded),
            **_numbers(own | leaves),
            "average": ranks.average,
            "masters": optimizer.kept_masters.kind,
            "optimizer": type(optimizer.optimizer).__name__,
        }
        check_equal(call, whole | shared, everyone, _text, _ADVICE)
    if not is_alone(ranks.deciders) and ranks.deciders is not everyone:
        check_equal(call, shared, ranks.deciders, _text, _ADVICE)


def compare_scalers(call: str, scaler: Any, values: dict[str, Any]) -> None:
    """Raise, on every rank, if their ``GradScaler`` are not to have the same state.

    Args:
        call (str): What the user called, for the errors.
        scaler (GradScaler): This rank's, with a group or in an optimizer with one.
        values (dict): The state that it is about to have, as Python numbers.
    """
    group = scaler.group or (scaler.owner and scaler.owner.ranks.group)
    if not _agreed.get() and not is_alone(group):
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
        # A saved state has other paths than the parameters that sharded() is given.
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
