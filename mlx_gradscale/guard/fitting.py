"""Which parameters a tree of gradients is for."""

from collections.abc import Iterator
from typing import Any

import mlx.core as mx

from ..state_tree import CONTAINERS, items


def fitting_parameters(gradients: Any, parameters: Any) -> Any:
    """Return the part of ``parameters`` that has gradients; raise if some do not fit.

    Args:
        gradients (Any): A tree of arrays.
        parameters (Any): A tree or a model, at least as large.
    """
    if not isinstance(gradients, dict):
        raise TypeError(
            f"The gradients must be a dict, as value_and_grad returns for a model, "
            f"got {type(gradients).__name__}."
        )
    return _fitting(gradients, parameters, "")


def _fitting(gradients: Any, parameters: Any, path: str) -> Any:
    if isinstance(gradients, CONTAINERS):
        if not isinstance(parameters, CONTAINERS):
            raise ValueError(f"There are gradients below {path!r} but no parameters.")
        part = {}
        for key, gradient in items(gradients):
            if isinstance(gradient, CONTAINERS) and not gradient:
                # Frozen or not a parameter at all: mlx-lm's Llama has strings there.
                part[key] = gradient
                continue
            where = f"{path}.{key}" if path else str(key)
            try:
                parameter = parameters[key]
            except (KeyError, IndexError, TypeError):
                raise ValueError(
                    f"There is a gradient for {where!r} but no such parameter. Pass "
                    "gradients and parameters of the same model."
                ) from None
            part[key] = _fitting(gradient, parameter, where)
        return part if isinstance(gradients, dict) else list(part.values())
    if not isinstance(gradients, mx.array):
        raise TypeError(
            f"The gradient of {path!r} must be an array, got {gradients!r}. Pass the "
            "tree of gradients that value_and_grad returned."
        )
    if not isinstance(parameters, mx.array):
        raise ValueError(f"There is a gradient for {path!r} but no such parameter.")
    if gradients.shape != parameters.shape:
        raise ValueError(
            f"The gradient of {path!r} has shape {gradients.shape}, the parameter "
            f"has {parameters.shape}."
        )
    return parameters


def parameter_places(
    gradients: Any, model: Any, path: str = ""
) -> Iterator[tuple[str, Any, Any]]:
    """Yield (path, container, key) in ``model`` for each leaf of ``gradients``."""
    for key, gradient in items(gradients):
        where = f"{path}.{key}" if path else str(key)
        if isinstance(gradient, CONTAINERS):
            if gradient:
                yield from parameter_places(gradient, model[key], where)
        else:
            yield where, model, key
