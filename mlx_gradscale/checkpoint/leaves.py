"""Every leaf of a live tree and where it is held, so that it can be replaced there."""

from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.optimizers import Optimizer
from mlx.utils import tree_flatten

from ..state_slots import CONTAINERS, items

Place = tuple[Any, Any]
# What an optimizer may keep in its state besides arrays; text and so on is its own.
NUMBERS = (bool, int, float)


def places(tree: Any, path: str = "") -> dict[str, Place]:
    """Return, by path as ``tree_flatten`` writes it, where each array and number is.

    Returns:
        dict: Container and key, by path.

    Example:
        >>> tree = {"a": [1, {"b": 2, "c": "text"}]}
        >>> {path: key for path, (_, key) in places(tree).items()}
        {'a.0': 0, 'a.1.b': 'b'}
    """
    found: dict[str, Place] = {}
    for key, value in items(tree):
        where = f"{path}.{key}" if path else str(key)
        if isinstance(value, CONTAINERS):
            found |= places(value, where)
        elif isinstance(value, (mx.array, *NUMBERS)):
            found[where] = tree, key
    return found


def weights(model: nn.Module) -> dict[str, mx.array]:
    """Return the parameters of a model, buffers and frozen ones too, by path.

    Raises:
        ValueError: Two have the same path.
    """
    flat = tree_flatten(model.parameters())
    found = dict(flat)
    if len(found) < len(flat):
        raise ValueError(
            "Two weights of the model have the same path when it is written with dots, "
            "as those of {'a.b': x, 'a': {'b': y}}. Rename one of them."
        )
    return found


def statistics(model: nn.Module) -> set[str]:
    """Return the paths of what BatchNorm writes, which moves though it is frozen."""
    names = ("running_mean", "running_var")
    return {
        f"{path}.{name}" if path else name
        for path, module in model.named_modules()
        if isinstance(module, nn.BatchNorm)
        for name in names
    }


def dtype_name(x: mx.array) -> str:
    """Return ``"float16"``, say."""
    return str(x.dtype).removeprefix("mlx.core.")


def parts(optimizer: Optimizer) -> Iterator[Optimizer]:
    """Yield the optimizers that step by themselves, of a ``MultiOptimizer`` all."""
    inside = getattr(optimizer, "optimizers", None)
    if inside is None:
        yield optimizer
    else:
        for part in inside:
            yield from parts(part)


def settings(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return what each part computes with, besides its state.

    Example:
        >>> import mlx.optimizers as optim
        >>> settings(optim.Lion(0.1, betas=(0.8, 0.9)))[0]["values"]
        {'betas': [0.8, 0.9], 'weight_decay': 0.0}
    """
    return [
        {
            "class": type(part).__name__,
            "schedules": sorted(part._schedulers),
            "values": {
                name: list(value) if isinstance(value, tuple) else value
                for name, value in sorted(vars(part).items())
                if not name.startswith("_") and _is_plain(value)
            },
        }
        for part in parts(optimizer)
    ]


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (bool, int, float, str))
