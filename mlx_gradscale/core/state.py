"""The state of a ``LossScaleOptimizer``: one dict of all its parts, and how it loads.

A loaded state is flat: each array by its path, such as ``"optimizer.layers.0.bias.m"``
or ``"masters.layers.0.bias"``.
"""

from typing import Any

import mlx.core as mx
from mlx.optimizers import Optimizer
from mlx.utils import tree_flatten, tree_unflatten

from .finite import all_finite
from .optimizers import is_builtin, single_optimizers
from .scale import DEFAULTS, TORCH_KEYS, clamp_and_check, read_field
from .trees import CONTAINERS, commit, dtype_name, slots

# What a load replaces: all entries except the scaler's fields, which the scaler loads
# itself, and max_grad_norm, which is a setting. A plain optimizer's state has only the
# first part.
LOADED = ("optimizer.", "masters.", "written.", "remainders.", "grad_norm")
_MASTERS = ("masters", "written", "remainders")
_CONSTANTS = (bool, int, float, str, type(None))
_SAME = "Load a state that was saved with the same model, optimizer and state_bits=."


class State(dict[str, Any]):
    """The state of a wrapper; keys that it lacks refer to the inner optimizer's state.

    Its values are the dicts that the inner optimizer, the scaler and the master weights
    use themselves, so that ``mx.compile`` captures them. ``state["step"]``, as trainers
    write it for a plain optimizer, works, but ``"step" in state`` is False.
    """

    def __init__(self, owner: Optimizer, entries: dict[str, Any]):
        super().__init__(entries)
        self.owner = owner

    def __reduce__(self) -> Any:  # a copy is a plain dict
        return dict, (dict(self),)

    def __missing__(self, key: str) -> Any:
        return single_optimizers(self.owner)[0].state[key]

    def __setitem__(self, key: str, value: Any) -> None:
        if key in self:
            super().__setitem__(key, value)
            return
        for part in single_optimizers(self.owner):
            old = part.state[key]
            if isinstance(old, mx.array) and not isinstance(value, mx.array):
                value = mx.array(value, old.dtype)
            part.state[key] = value


def emptied(state: State) -> State:
    """Return a state without moments and master weights; the given one keeps them.

    The inner optimizers get new dicts.
    """
    for part in single_optimizers(state.owner):
        part.state = dict(part.state)
    _remove_moments(state.owner)
    blank: dict[str, Any] = {name: {} for name in _MASTERS if name in state}
    return State(state.owner, state | blank | {"optimizer": state.owner.state})


def parse(saved: Any, state: State) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Return a saved state by path, and the fields of the scaler; raise if invalid.

    ``state`` is the current one. The fields are None if the saved state is that of a
    plain optimizer.
    """
    is_third_party = not is_builtin(state.owner)
    if not isinstance(saved, dict):
        raise TypeError(f"The state must be a dict, got {type(saved).__name__}.")
    loaded = dict(tree_flatten(saved))
    fields = None
    if any(f"scaler.{name}" in loaded for name in DEFAULTS):
        loaded.pop("max_grad_norm", None)
        fields = _take_fields(loaded, state["scaler"])
    else:
        loaded = {f"optimizer.{path}": x for path, x in loaded.items()}
    if not any(path.startswith("optimizer.") for path in loaded):
        raise ValueError(f"The state has no arrays in 'optimizer'. {_SAME}")
    for path, x in loaded.items():
        # A third-party optimizer may keep Python values in its state.
        if not (path.startswith("optimizer.") and isinstance(x, _CONSTANTS)):
            _check_array(path, x, is_third_party)
    # Evaluate now, while the file exists, and not inside a trace.
    mx.eval([x for x in loaded.values() if isinstance(x, mx.array)])
    return loaded, fields


def _take_fields(loaded: dict[str, Any], scaler: dict[str, mx.array]) -> dict[str, Any]:
    """Remove the scaler's fields and return them.

    A state that an older version saved may lack fields; they take their defaults.
    """
    fields = {}
    for name, default in DEFAULTS.items():
        x = loaded.pop(f"scaler.{name}", None)
        if x is None and name not in TORCH_KEYS.values():
            fields[name] = default
        else:
            _check_same(f"scaler.{name}", scaler[name], x)
            fields[name] = read_field(name, x)
    return clamp_and_check(fields)


def replace(state: State, loaded: dict[str, Any], parts: tuple[str, ...]) -> bool:
    """Replace the arrays of an initialized state, or raise if they do not match.

    Return whether the state is complete. ``parts`` are the prefixes of the paths to
    replace. A third-party optimizer may add to its state during a step. Then whole
    lists are replaced, and :func:`initialize` has to complete them, because saved lists
    lack empty entries at the end.
    """
    places = {".".join(map(str, path)): (box, key) for path, box, key in slots(state)}
    here = {path: place for path, place in places.items() if path.startswith(parts)}
    for path, (box, key) in here.items():
        _check_same(path, box[key], loaded.get(path))
    added = loaded.keys() - here.keys()
    if added and is_builtin(state.owner):
        raise ValueError(
            f"The state contains {min(added)!r}, which this optimizer does not have. "
            f"{_SAME}"
        )
    if added:
        write(state, loaded, parts)
    else:
        commit((box, key, loaded[path]) for path, (box, key) in here.items())
    return not added


def write(state: State, loaded: dict[str, Any], parts: tuple[str, ...]) -> None:
    """Write loaded values to a state that may not be initialized, without checks."""
    inner = tree_unflatten(list(loaded.items()))["optimizer"]
    there, here = map(_single_states, (inner, state.owner.state))
    if len(there) != len(here):
        raise ValueError(
            f"The state has {len(there)} inner optimizers, but this optimizer has "
            f"{len(here)}. {_SAME}"
        )
    take(state, parts)
    for old, new in zip(here, there, strict=True):
        old.update(new)
    for path, x in loaded.items():
        name, _, own_path = path.partition(".")
        if name == "grad_norm":
            state[name] = x
        elif name != "optimizer" and path.startswith(LOADED):
            state[name][own_path] = x


def take(state: State, parts: tuple[str, ...]) -> dict[str, Any]:
    """Remove and return, by path, what was loaded before the parameters were known.

    The values come from the state itself: if this runs inside ``mx.compile``, they are
    tracers, which a copy of the loaded state would not have.
    """
    found = {p: x for p, x in tree_flatten(state) if p.startswith(parts)}
    if parts:
        _remove_moments(state.owner)
    for name in _MASTERS:
        if f"{name}." in parts and name in state:
            state[name].clear()
    return found


def _remove_moments(optimizer: Optimizer) -> None:
    for part in single_optimizers(optimizer):
        for key in [k for k, x in part.state.items() if isinstance(x, CONTAINERS)]:
            del part.state[key]


def _single_states(state: dict[str, Any]) -> list[dict[str, Any]]:
    # A model's attribute may be named "states" too, but then there is also a "step".
    if state.keys() != {"states"}:
        return [state]
    return [x for each in state["states"] for x in _single_states(each)]


def _check_same(path: str, here: mx.array, there: Any) -> None:
    if not isinstance(there, mx.array):
        raise ValueError(f"The state has no array {path!r}. {_SAME}")
    # The saved bits may belong to a weight of the other half-precision dtype.
    is_other = here.dtype != there.dtype and not path.startswith("written.")
    if here.shape != there.shape or is_other:
        raise ValueError(
            f"{path!r} is {dtype_name(there)} with shape {there.shape} in the state, "
            f"but {dtype_name(here)} with shape {here.shape} in this optimizer. {_SAME}"
        )


def _check_array(path: str, x: Any, is_third_party: bool) -> None:
    if not isinstance(x, mx.array):
        raise TypeError(f"{path!r} in the state must be an mx.array, got {x!r}.")
    # The gradient norm of a skipped step is non-finite, and a third-party optimizer may
    # keep, for example, the best loss so far, which starts as inf.
    may_be = path == "grad_norm" or (is_third_party and path.startswith("optimizer."))
    if not may_be and not all_finite(x):
        raise ValueError(
            f"The state contains non-finite values in {path!r}. Load an earlier "
            "checkpoint."
        )
