"""The state of a wrapper: one dict of all its parts, and how a saved state loads.

A loaded state is flat: each array by its path, such as ``"optimizer.layers.0.bias.m"``
or ``"masters.layers.0.bias"``. If the optimizer is uninitialized, or has to decode the
loaded state, that state waits in its place for ``init()``, which checks it.
"""

from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any

import mlx.core as mx
from mlx.optimizers import MultiOptimizer, Optimizer
from mlx.utils import tree_flatten, tree_unflatten

from .eight_bit import EightBit
from .masters import HALF, SixteenBit, Storage
from .optimizers import is_builtin, single_optimizers
from .scale import DEFAULTS, TORCH_KEYS, as_arrays
from .trees import CONTAINERS, commit, dtype_name, slots

Loaded = dict[str, Any]

STORAGES = {32: Storage(), 16: SixteenBit(), 8: EightBit()}
# The names of the dicts that store master weights.
_STORED = {name for storage in STORAGES.values() for name in storage.names}
_SAME = "Load a state that was saved with the same model and optimizer."


class State(dict[str, Any]):
    """The state of a wrapper; keys that it lacks refer to the inner optimizer's state.

    Its values are the dicts that the inner optimizer, the scaler and the master weights
    use themselves, so that ``mx.compile`` captures them. ``state["step"]``, as trainers
    write it for a plain optimizer, works, but ``"step" in state`` is False.
    """

    def __init__(self, owner: Optimizer, names: tuple[str, ...], entries: Loaded):
        super().__init__(entries)
        self.owner = owner
        # Of the dicts that store master weights.
        self.names = names

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

    def remove_masters(self) -> None:
        """Replace the dicts that store master weights by empty ones."""
        for name in _STORED:
            self.pop(name, None)
        dict.update(self, {name: {} for name in self.names})

    def emptied(self) -> "State":
        """Return a state without moments and master weights; this one keeps them."""
        for part in single_optimizers(self.owner):
            part.state = dict(part.state)
        new = State(self.owner, self.names, self | {"optimizer": self.owner.state})
        new.remove_masters()
        _remove_moments(self.owner)
        return new


def _remove_moments(optimizer: Optimizer) -> None:
    for part in single_optimizers(optimizer):
        for key in [k for k, x in part.state.items() if isinstance(x, CONTAINERS)]:
            del part.state[key]


def parse(saved: Any, state: State) -> tuple[Loaded, Loaded]:
    """Return a saved state by path, and the fields of the scaler; raise if invalid.

    Values are not read, because a state may be assigned inside ``mx.compile``. Fields
    that an older version did not save take their defaults.
    """
    if not isinstance(saved, dict):
        raise TypeError(f"The state must be a dict, got {type(saved).__name__}.")
    loaded = dict(tree_flatten(saved))
    loaded.pop("max_grad_norm", None)  # a setting
    for path, x in loaded.items() if is_builtin(state.owner) else ():
        if not isinstance(x, mx.array):
            raise TypeError(f"{path!r} in the state must be an mx.array, got {x!r}.")
    optional = {k: x for k, x in DEFAULTS.items() if k not in TORCH_KEYS.values()}
    fields = {f"scaler.{name}": x for name, x in as_arrays(optional).items()}
    fields |= {p: loaded.pop(p) for p in [*loaded] if p.startswith("scaler.")}
    own = {f"scaler.{name}": x for name, x in state["scaler"].items()}
    if problem := _find_difference(own, fields):
        raise ValueError(problem)
    return loaded, {path.removeprefix("scaler."): x for path, x in fields.items()}


def load(
    state: State, loaded: Loaded, bits: int, weights: Mapping[str, mx.array] | None
) -> bool:
    """Replace the arrays of a state in these ``state_bits``, or raise without changes.

    Return False, and change nothing, if it has to wait for ``init()``: 32 bits hold any
    state, but decoding it needs the ``weights`` by path, and what a third-party
    optimizer has saved may be incomplete.
    """
    is_known = is_builtin(state.owner)
    if not is_known:
        rest = [path for path in loaded if not path.startswith("optimizer.")]
        loaded = {path: loaded[path] for path in rest}
    own = _places(state)
    arrays = {path: box[key] for path, (box, key) in own.items()}
    problem, saved = _find_difference(arrays, loaded), bits_of(loaded)
    if problem is not None and is_known and saved != bits:
        if bits != 32:
            any_state = ", or with state_bits=32, which can load any state"
            raise ValueError(
                f"The state was saved with state_bits={saved}, but this optimizer has "
                f"state_bits={bits}. Create the optimizer with state_bits={saved}"
                f"{any_state if saved != 32 else ''}."
            )
        if weights is None:
            return False
        loaded = decode(loaded, state.owner, saved, weights)
        problem = _find_difference(arrays, loaded)
    if problem is not None:
        raise ValueError(problem)
    if weights is None and not is_known:
        return False
    commit((box, key, loaded[path]) for path, (box, key) in own.items())
    return True


def _places(state: State) -> dict[str, tuple[Any, Any]]:
    """Return where a load writes, by path.

    Not to the scaler and ``max_grad_norm``, nor to what a third-party optimizer keeps:
    it may have added keys in a step, so only itself could check a loaded state.
    """
    left_out = {"scaler", "max_grad_norm"}
    if not is_builtin(state.owner):
        left_out.add("optimizer")
    places = {}
    for path, box, key in slots(state):
        if path[0] not in left_out:
            places[".".join(map(str, path))] = box, key
    return places


def wait(state: State, loaded: Loaded) -> None:
    """Write a loaded state to its place, where it waits for :func:`take`.

    If this runs inside ``mx.compile``, the arrays in the state are tracers.
    """
    rest, inner = dict(loaded), []
    for name, part in _named_optimizers(state.owner):
        own = [path for path in rest if path.startswith(f"{name}.")]
        values = [(path.removeprefix(f"{name}."), rest.pop(path)) for path in own]
        inner.append((part.state, tree_unflatten(values) if values else {}))
    for path in rest:
        if path != "grad_norm" and path.split(".")[0] not in _STORED:
            raise ValueError(_describe_surplus(path))
    state.remove_masters()
    _remove_moments(state.owner)
    for box, tree in inner:
        box.update(tree)
    for path, x in rest.items():
        name, _, own_path = path.partition(".")
        if own_path:
            dict.setdefault(state, name, {})[own_path] = x
        else:
            state[name] = x  # grad_norm


def take(state: State) -> Loaded:
    """Remove and return the state that waits, without a third-party optimizer's."""
    loaded = {path: box[key] for path, (box, key) in _places(state).items()}
    state.remove_masters()
    if is_builtin(state.owner):
        _remove_moments(state.owner)
    return loaded


def bits_of(loaded: Mapping[str, Any]) -> int:
    """Return the ``state_bits`` of a state.

    The most bits if several kinds store the same arrays.
    """
    arrays = [(p, x.dtype) for p, x in loaded.items() if isinstance(x, mx.array)]
    dtypes = {(path.split(".")[0], dtype) for path, dtype in arrays}
    for bits, storage in sorted(STORAGES.items()):
        if dtypes & set(product(("optimizer", *storage.names), storage.dtypes)):
            return bits
    return 32


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
        if stored and weight.dtype in HALF:
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
    """Yield each single optimizer with the path of its state."""
    if not isinstance(optimizer, MultiOptimizer):
        yield prefix, optimizer
        return
    for i, part in enumerate(optimizer.optimizers):
        yield from _named_optimizers(part, f"{prefix}.states.{i}")


def _find_difference(own: Mapping[str, mx.array], loaded: Loaded) -> str | None:
    """Return how a loaded state differs from arrays in structure, or None."""
    for path, here in own.items():
        there = loaded.get(path)
        if not isinstance(there, mx.array):
            return f"The state has no array {path!r}. {_SAME}"
        # The saved bits may belong to a weight of the other half-precision dtype.
        is_same_dtype = here.dtype == there.dtype or path.startswith("written.")
        if here.shape != there.shape or not is_same_dtype:
            return (
                f"{path!r} is {dtype_name(there)} with shape {there.shape} in the "
                f"state, but {dtype_name(here)} with shape {here.shape} in this "
                f"optimizer. {_SAME}"
            )
    for path in sorted(loaded.keys() - own.keys()):
        return _describe_surplus(path)
    return None


def _describe_surplus(path: str) -> str:
    return f"The state contains {path!r}, which this optimizer does not have. {_SAME}"
