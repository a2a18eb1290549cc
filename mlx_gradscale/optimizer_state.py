"""Take over a saved state of a ``LossScaleOptimizer``: check all of it, then write."""

from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from .finite import nonfinite
from .remainder import remainder_of
from .scale import FIELDS, as_array, check, clamped, read
from .state_tree import CONTAINERS, items

# What a saved state may have or not, and is not taken over.
NOT_LOADED = ("scaler.buffers.", "max_grad_norm")
_CONSTANTS = (bool, int, float, str, type(None))


def check_loaded(loaded: dict[str, Any], scaler_state: dict[str, mx.array]) -> None:
    """Raise for what no optimizer can use: all that is seen without its parameters.

    Args:
        loaded (dict): The leaves of a state by their path. Its scales are brought into
            the limits, in place: other versions had others.
        scaler_state (dict): The state of the scaler that is to take its part.
    """
    for path, x in loaded.items():
        # Other people's optimizers keep constants beside their arrays.
        constant = path.startswith("optimizer.") and isinstance(x, _CONSTANTS)
        if not isinstance(x, mx.array) and not constant:
            raise TypeError(f"{path!r} must be an array, got {x!r}.")
    scaler = {
        path.removeprefix("scaler."): x
        for path, x in loaded.items()
        if path.startswith("scaler.") and not path.startswith(NOT_LOADED)
    }
    if not scaler:
        raise ValueError(
            "This is the state of a plain optimizer, not of a LossScaleOptimizer. It "
            "belongs into the optimizer inside: wrapper.optimizer.state = ..., before "
            "the first step."
        )
    for name in FIELDS.keys() ^ scaler.keys():
        has = "has no" if name in FIELDS else "has"
        raise ValueError(
            f"This is not the state of a LossScaleOptimizer: it {has} 'scaler.{name}'."
        )
    for name, x in scaler.items():
        here = scaler_state[name]
        if (x.shape, x.dtype) != (here.shape, here.dtype):
            raise ValueError(
                f"'scaler.{name}' must be {here.dtype} of shape (), got {x.dtype} "
                f"of shape {x.shape}."
            )
    numbers = read(scaler)
    usable = clamped(numbers)
    check(usable)
    changed = {k: x for k, x in usable.items() if x != numbers[k]}
    loaded.update({f"scaler.{k}": as_array(k, x) for k, x in changed.items()})
    # An overflowing step leaves its norm behind, so that one may be inf.
    others = {
        path: x
        for path, x in loaded.items()
        if isinstance(x, mx.array)
        and path != "grad_norm"
        and not path.startswith(NOT_LOADED)
    }
    for record in nonfinite(others):
        raise ValueError(f"{record.path!r} in the state holds NaN or inf.")


def with_masters_as_here(
    loaded: dict[str, Any],
    remainders: dict[str, mx.array],
    halves: dict[str, str],
    keeps_remainders: bool,
) -> dict[str, Any]:
    """Return a state whose masters are of the kind that an optimizer keeps.

    Args:
        loaded (dict): The leaves of a state by their path.
        remainders (dict): Those of the optimizer, by the path of their parameter.
        halves (dict): The names of the dtypes of its half parameters, by path.
        keeps_remainders (bool): Whether it keeps remainders, or float32 masters.
    """
    if not keeps_remainders:
        for path in loaded:
            if path.startswith("remainders."):
                raise ValueError(
                    f'The state has {path!r}, of masters="remainder", which is a '
                    "master only with its weight, and this optimizer has "
                    'masters="float32": make it with masters="remainder", or use '
                    "save_checkpoint(), whose folders fit both."
                )
        return loaded
    masters = {f"masters.{path}": path for path in remainders}
    if not masters.keys() & loaded.keys():
        return loaded
    # The weights were these masters, rounded.
    found = {k: x for k, x in loaded.items() if not k.startswith("written.")}
    for key, path in masters.items():
        if key in found:
            master = found.pop(key)
            weight = master.astype(getattr(mx, halves[path]))
            found[f"remainders.{path}"] = remainder_of(master, weight)
    return found


def write_in_place(state: dict[str, Any], loaded: dict[str, Any]) -> None:
    """Replace every array of ``state``, or raise and replace none.

    Args:
        state (dict): A tree whose containers are kept: compiled steps hold them.
        loaded (dict): The new leaves by their path.
    """
    own = dict(tree_flatten(state))
    for path in [*own, *loaded]:
        if path not in loaded and not isinstance(own[path], mx.array):
            # A constant, which a file of arrays is without.
            continue
        if path not in loaded:
            raise ValueError(f"The state has no {path!r}, this optimizer has.")
        if path not in own:
            raise ValueError(
                f"The state has {path!r}, this optimizer has not: it belongs to "
                "another model or optimizer."
            )
        here, there = own[path], loaded[path]
        if not (isinstance(here, mx.array) and isinstance(there, mx.array)):
            if repr(here) != repr(there):
                raise ValueError(
                    f"{path!r} is {there!r} in the state, {here!r} in this optimizer: "
                    "make it with the settings of the one that was saved."
                )
            continue
        if (here.shape, here.dtype) != (there.shape, there.dtype):
            raise ValueError(
                f"{path!r} is {there.dtype} of shape {there.shape} in the state, "
                f"{here.dtype} of shape {here.shape} in this optimizer."
            )
    _write_leaves(state, "", loaded)


def _write_leaves(tree: Any, path: str, values: dict[str, mx.array]) -> None:
    for key, child in items(tree):
        where = f"{path}.{key}" if path else str(key)
        if isinstance(child, mx.array):
            tree[key] = values[where]
        elif isinstance(child, CONTAINERS):
            _write_leaves(child, where, values)
