"""The state of a wrapper: one dict of all its parts, and how a saved state loads.

A loaded state is flat: each array by its path, such as ``"optimizer.layers.0.bias.m"``
or ``"masters.layers.0.bias"``.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import mlx.core as mx
from mlx.optimizers import MultiOptimizer, Optimizer
from mlx.utils import tree_flatten, tree_unflatten

from .optimizers import is_builtin, single_optimizers
from .scale import DEFAULTS, TORCH_KEYS, as_array
from .storage import STORAGES, bits_of
from .trees import CONTAINERS, commit, dtype_name, slots

Loaded = dict[str, Any]
# A third-party optimizer may keep Python values in its state.
_CONSTANTS = (bool, int, float, str, type(None))
_SAME = "Load a state that was saved with the same model and optimizer."


class State(dict[str, Any]):
    """The state of a wrapper; keys that it lacks refer to the inner optimizer's state.

    Its values are the dicts that the inner optimizer, the scaler and the master weights
    use themselves, so that ``mx.compile`` captures them. ``state["step"]``, as trainers
    write it for a plain optimizer, works, but ``"step" in state`` is False.
    """

    def __init__(self, owner: Optimizer, entries: dict[str, Any]):
        super().__init__(entries)
        self.owner = owner
        self.names = frozenset(entries)

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

    def emptied(self) -> "State":
        """Return a state without moments and master weights; this one keeps them."""
        for part in single_optimizers(self.owner):
            part.state = dict(part.state)
        _remove_moments(self.owner)
        entries = {
            name: {} if name in _stored_names() else x for name, x in self.items()
        }
        return State(self.owner, entries | {"optimizer": self.owner.state})


def parse(saved: Any, state: State) -> tuple[Loaded, dict[str, mx.array]]:
    """Return a saved state by path, and the fields of the scaler; raise if invalid.

    Values are not read, because a state may be assigned inside ``mx.compile``. Fields
    that an older version did not save take their defaults.
    """
    if not isinstance(saved, dict):
        raise TypeError(f"The state must be a dict, got {type(saved).__name__}.")
    loaded = dict(tree_flatten(saved))
    loaded.pop("max_grad_norm", None)  # a setting
    fields = {}
    for name, default in DEFAULTS.items():
        x = loaded.pop(f"scaler.{name}", None)
        if x is None and name not in TORCH_KEYS.values():
            x = as_array(name, default)
        _check_same(f"scaler.{name}", state["scaler"][name], x)
        fields[name] = x
    has_constants = not is_builtin(state.owner)
    for path, x in loaded.items():
        is_constant = has_constants and isinstance(x, _CONSTANTS)
        if not isinstance(x, mx.array) and not is_constant:
            raise TypeError(f"{path!r} in the state must be an mx.array, got {x!r}.")
    return loaded, fields


def flat(state: State) -> dict[str, mx.array]:
    """Return the arrays that a load replaces, by path."""
    return {path: box[key] for path, (box, key) in _places(state).items()}


def replace(state: State, loaded: Loaded) -> bool:
    """Replace the arrays of an initialized state, or raise if they do not match.

    Return whether the state is complete. A third-party optimizer may add to its state
    during a step. Then all of its state is replaced, and :func:`initialize` has to
    complete it, because saved lists lack empty entries at the end.
    """
    places = _places(state)
    for path, (box, key) in places.items():
        _check_same(path, box[key], loaded.get(path))
    added = loaded.keys() - places.keys()
    for path in sorted(added):
        if is_builtin(state.owner) or not path.startswith("optimizer."):
            raise ValueError(
                f"The state contains {path!r}, which this optimizer does not have. "
                f"{_SAME}"
            )
    if added:
        put(state, loaded)
    else:
        commit((box, key, loaded[path]) for path, (box, key) in places.items())
    return not added


def put(state: State, loaded: Loaded) -> None:
    """Write loaded values to a state, where they wait for :func:`take`."""
    tree = tree_unflatten(list(loaded.items()))
    there, here = map(_single_states, (tree.get("optimizer", {}), state.owner.state))
    if len(there) != len(here):
        raise ValueError(
            f"The state has {len(there)} inner optimizers, but this optimizer has "
            f"{len(here)}. {_SAME}"
        )
    take(state)
    for old, new in zip(here, there, strict=True):
        old.update(new)
    for path, x in loaded.items():
        name, _, own_path = path.partition(".")
        if name == "grad_norm":
            state[name] = x
        elif name != "optimizer":
            dict.setdefault(state, name, {})[own_path] = x


def take(state: State) -> Loaded:
    """Remove and return, by path, a loaded state that the parameters have to complete.

    The values come from the state itself: if this runs inside ``mx.compile``, they are
    tracers, which a copy of the loaded state would not have.
    """
    found = {
        path: x
        for path, x in tree_flatten(state)
        if path.split(".")[0] not in ("scaler", "max_grad_norm")
    }
    _remove_moments(state.owner)
    for name in _stored_names() & state.keys():
        if name in state.names:
            state[name].clear()
        else:  # of a state with other state_bits
            del state[name]
    return found


def adapt_bits(
    loaded: Loaded,
    own: Mapping[str, mx.array],
    optimizer: Optimizer,
    bits: int,
    parameters: Mapping[str, mx.array] | None,
) -> Loaded | None:
    """Return a loaded state in these ``state_bits``, or raise if they cannot hold it.

    32 bits hold any state, decoded with the ``parameters`` by path, without which the
    result is None. ``own`` are the arrays of the optimizer's present state.
    """
    if all(_is_same(path, x, loaded.get(path)) for path, x in own.items()):
        return loaded
    saved = bits_of({p: x for p, x in loaded.items() if isinstance(x, mx.array)})
    if saved == bits or not is_builtin(optimizer):
        return loaded  # another difference, which the caller reports
    if bits != 32:
        any_state = ", or with state_bits=32, which can load any state"
        other = any_state if saved != 32 else ""
        raise ValueError(
            f"The state was saved with state_bits={saved}, but this optimizer has "
            f"state_bits={bits}. Create the optimizer with state_bits={saved}{other}."
        )
    return None if parameters is None else decode(loaded, optimizer, saved, parameters)


def decode(
    loaded: Loaded, optimizer: Optimizer, bits: int, parameters: Mapping[str, mx.array]
) -> Loaded:
    """Return a state that was saved in these bits with float32 masters and moments."""
    storage, decoded = STORAGES[bits], dict(loaded)
    moments: dict[str, dict[str, mx.array]] = {}
    for path, x in loaded.items():
        owner, _, name = path.rpartition(".")
        moments.setdefault(owner, {})[name] = x
    for path, weight in parameters.items():
        names = [name for name in storage.names if f"{name}.{path}" in loaded]
        stored = {name: decoded.pop(f"{name}.{path}") for name in names}
        if stored:
            master = storage.join(weight, stored).master
            for name, x in STORAGES[32].split(master, weight).items():
                decoded[f"{name}.{path}"] = x
        for prefix, part in _named_optimizers(optimizer):
            owner = f"{prefix}.{path}"
            if owner in moments:
                for name, x in storage.decode(part, moments[owner]).items():
                    decoded[f"{owner}.{name}"] = x
    return decoded


def _named_optimizers(
    optimizer: Optimizer, prefix: str = "optimizer"
) -> Iterator[tuple[str, Optimizer]]:
    if not isinstance(optimizer, MultiOptimizer):
        yield prefix, optimizer
        return
    for i, part in enumerate(optimizer.optimizers):
        yield from _named_optimizers(part, f"{prefix}.states.{i}")


def _places(state: State) -> dict[str, tuple[Any, Any]]:
    """Return where a load writes: not to the scaler's fields and max_grad_norm."""
    return {
        ".".join(map(str, path)): (box, key)
        for path, box, key in slots(state)
        if path[0] not in ("scaler", "max_grad_norm")
    }


def _stored_names() -> set[str]:
    return {name for storage in STORAGES.values() for name in storage.names}


def _remove_moments(optimizer: Optimizer) -> None:
    for part in single_optimizers(optimizer):
        for key in [k for k, x in part.state.items() if isinstance(x, CONTAINERS)]:
            del part.state[key]


def _single_states(state: dict[str, Any]) -> list[dict[str, Any]]:
    # A model's attribute may be named "states" too, but then there is also a "step".
    if state.keys() != {"states"}:
        return [state]
    return [x for each in state["states"] for x in _single_states(each)]


def _is_same(path: str, here: mx.array, there: Any) -> bool:
    # The saved bits may belong to a weight of the other half-precision dtype.
    is_free = path.startswith("written.")
    return (
        isinstance(there, mx.array)
        and here.shape == there.shape
        and (is_free or here.dtype == there.dtype)
    )


def _check_same(path: str, here: mx.array, there: Any) -> None:
    if not isinstance(there, mx.array):
        raise ValueError(f"The state has no array {path!r}. {_SAME}")
    if not _is_same(path, here, there):
        raise ValueError(
            f"{path!r} is {dtype_name(there)} with shape {there.shape} in the state, "
            f"but {dtype_name(here)} with shape {here.shape} in this optimizer. {_SAME}"
        )
