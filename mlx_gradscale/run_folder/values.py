"""Plain Python values as JSON and back, without losing a type.

JSON has no tuples, no keys but strings, no NaN, no tensors. Each of these becomes
an object with one ``$`` key; everything else is written as it is, so that the file
stays readable.

Without it a checkpoint would not come back from MLX as PyTorch knows it: states by
index would have text for keys, which ``load_state_dict`` does not find, a schedule's
Counter would be a dict, and random states and objects of other programs would be lost.
"""

import base64
import io
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import mlx.core as mx
import numpy as np

from ..files.text import dtype_name, dtype_named
from .. import torch_checkpoint
from ..torch_checkpoint.foreign import DefaultDict, Placeholder, TorchName, TorchSize


class SectionMark(str):
    """A mark in a checkpoint where a section was cut out; its value is the name."""


# Up to here a tensor is written in the JSON itself (a BatchNorm counter, say).
_MOST_INLINE = 16
# Bytes that one value's JSON may take: the settings of real runs are some megabytes.
_MOST = 2**28
# Bytes of a line of it, besides its text.
_LINE = 24
_SEQUENCES: dict[str, Callable[..., Any]] = {
    "$tuple": tuple,
    "$set": set,
    "$frozenset": frozenset,
    "$size": TorchSize,
}
# PyTorch's files are read to a depth of 128 (torch_checkpoint.Limits).
_DEEPEST = 160
_MAPPINGS: dict[str, Callable[..., Any]] = {
    "$dict": dict,
    "$ordered": OrderedDict,
    "$counter": Counter,
}


def encode(value: Any, tensors: dict[str, mx.array], name: str = "") -> Any:
    """Make a value that ``json.dumps`` takes.

    Args:
        value (Any): Nested containers, Python values, arrays.
        tensors (dict): Receives the larger arrays, by the name the JSON refers to; one
            that comes twice has one name.
        name (str): Where the value is; names its arrays.

    Returns:
        The JSON value.

    Raises:
        ValueError: If it would take more than 256 MB, which a small checkpoint can
            bring about by holding the same value very often.

    Example:
        >>> encode({"betas": (0.9, 0.99), 1: float("nan")}, {})
        {'$dict': [['betas', {'$tuple': [0.9, 0.99]}], [1, {'$float': 'nan'}]]}
    """
    return _Encoder(tensors, name).encode(value)


def decode(value: Any, tensors: dict[str, mx.array]) -> Any:
    """Return the value that :func:`encode` was given.

    Example:
        >>> decode(encode((1, {"x": b"ab"}), {}), {})
        (1, {'x': b'ab'})
    """
    return _Decoder(tensors).decode(value)


def each_value(value: Any) -> Iterator[Any]:
    """Yield all values inside a value, without recursion.

    Raises:
        ValueError: They are nested too deep.
    """
    left = [(value, 0)]
    while left:
        value, depth = left.pop()
        yield value
        if depth > _DEEPEST:
            raise ValueError(f"it is nested more than {_DEEPEST} times")
        if isinstance(value, Mapping):
            left += ((inner, depth + 1) for inner in value.values())
        elif isinstance(value, (list, tuple)):
            left += ((inner, depth + 1) for inner in value)


class _Encoder:
    def __init__(self, tensors: dict[str, mx.array], name: str) -> None:
        self._tensors = tensors
        self._names = {id(array): key for key, array in tensors.items()}
        # Kept apart, not as one text: a file may have one long key above many values.
        self._path: list[Any] = [name]
        self._room = _MOST

    def encode(self, value: Any) -> Any:
        # Its line is indented by as many spaces as there are containers around it.
        self._take(_LINE + 2 * len(self._path))
        if isinstance(value, SectionMark):
            return {"$section": str(value)}
        if isinstance(value, str):
            self._take(len(value))
            return {"$torch": str(value)} if type(value) is TorchName else value
        if value is None or isinstance(value, (bool, int)):
            return value
        if isinstance(value, float):
            return value if math.isfinite(value) else {"$float": str(value)}
        if isinstance(value, complex):
            return {"$complex": [str(value.real), str(value.imag)]}
        if isinstance(value, (bytes, bytearray)):
            kind = "$bytes" if isinstance(value, bytes) else "$bytearray"
            return {kind: self._base64(value)}
        if isinstance(value, mx.array):
            return self._array(value)
        if type(value) is list:
            return [self._item(i, item) for i, item in enumerate(value)]
        for tag, made in _SEQUENCES.items():
            if type(value) is made:
                return {tag: [self._item(i, item) for i, item in enumerate(value)]}
        for tag, made in _MAPPINGS.items():
            if type(value) is made:
                return self._mapping(value, tag)
        if type(value) is DefaultDict:
            items = self._mapping(value, "$dict")
            return {"$default": [self.encode(value.factory), items]}
        if isinstance(value, Placeholder):
            return self._placeholder(value)
        raise TypeError(
            f"{self._where() or 'The checkpoint'} is a {type(value).__name__}, which "
            "cannot be written to training.json: leave it out of the checkpoint."
        )

    def _take(self, size: int) -> None:
        self._room -= size
        if self._room < 0:
            raise ValueError(
                f"{self._where() or 'The checkpoint'}: training.json would take over "
                f"{_MOST // 2**20} MB, because values are shared in the checkpoint or "
                "it holds more than settings: leave that out of the checkpoint."
            )

    def _where(self) -> str:
        return ".".join(str(key)[:80] for key in self._path).lstrip(".")

    def _item(self, key: Any, value: Any) -> Any:
        self._path.append(key)
        encoded = self.encode(value)
        self._path.pop()
        return encoded

    def _base64(self, data: bytes | bytearray) -> str:
        self._take(4 * len(data) // 3)
        return base64.b64encode(data).decode()

    def _mapping(self, value: dict[Any, Any], tag: str) -> Any:
        plain = all(isinstance(key, str) and not key.startswith("$") for key in value)
        if plain:
            self._take(sum(map(len, value)))
            inner = {key: self._item(key, item) for key, item in value.items()}
            return inner if tag == "$dict" else {tag: inner}
        pairs = []
        for key, item in value.items():
            pairs.append([self._item("key", key), self._item(key, item)])
        return {tag: pairs}

    def _placeholder(self, value: Placeholder) -> Any:
        """Return the object's own pickle, and what it is, for who reads the JSON."""
        file = io.BytesIO()
        torch_checkpoint.save(file, value)
        return {"$object": {"is": str(value), "pt": self._base64(file.getvalue())}}

    def _array(self, value: mx.array) -> Any:
        dtype = dtype_name(value)
        if dtype == "float64":  # MLX's safetensors have none
            data = self._base64(np.array(value).astype("<f8").tobytes())
            return {"$float64": {"shape": value.shape, "data": data}}
        inline = value.size <= _MOST_INLINE and dtype != "complex64"
        if inline and bool(mx.all(mx.isfinite(value)).item()):
            self._take(_LINE * value.size)
            values = value.reshape(-1).tolist()
            return {"$array": {"dtype": dtype, "shape": value.shape, "data": values}}
        if id(value) not in self._names:
            name = self._where() or "value"
            while name in self._tensors:
                name += "_"
            self._tensors[name] = value
            self._names[id(value)] = name
        return {"$tensor": self._names[id(value)]}


class _Decoder:
    def __init__(self, tensors: dict[str, mx.array]) -> None:
        self._tensors = tensors

    def decode(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self.decode(item) for item in value]
        if not isinstance(value, dict):
            return value
        if len(value) != 1 or not next(iter(value)).startswith("$"):
            return {key: self.decode(item) for key, item in value.items()}
        ((tag, held),) = value.items()
        if tag == "$tuple":
            return tuple(self.decode(held))
        if tag == "$size":
            return TorchSize(held)
        if tag in _SEQUENCES:
            return _SEQUENCES[tag](self.decode(held))
        if tag in _MAPPINGS:
            return _MAPPINGS[tag](self._pairs(held))
        if tag == "$default":
            factory, items = map(self.decode, held)
            if not isinstance(factory, (Placeholder, type(None))):
                raise ValueError("training.json holds a defaultdict of no class.")
            return DefaultDict(items, factory)
        if tag == "$object":
            return torch_checkpoint.load(base64.b64decode(held["pt"]))
        if tag in _LEAVES:
            return _LEAVES[tag](held)
        if tag == "$tensor":
            if held not in self._tensors:
                raise ValueError(f"training.json refers to a missing tensor {held!r}.")
            return self._tensors[held]
        raise ValueError(f"training.json holds {tag!r}, which is not known here.")

    def _pairs(self, held: Any) -> dict[Any, Any]:
        found: dict[Any, Any] = {}
        for key, item in held.items() if isinstance(held, dict) else held:
            key = self.decode(key)
            found[key] = self.decode(item)
        return found


def _decode_array(held: dict[str, Any]) -> mx.array:
    dtype = dtype_named(held["dtype"])
    return mx.array(held["data"], dtype).reshape(held["shape"])


def _decode_float64(held: dict[str, Any]) -> mx.array:
    data = np.frombuffer(base64.b64decode(held["data"]), "<f8")
    return mx.array(data.reshape(held["shape"]), mx.float64)


_LEAVES: dict[str, Callable[..., Any]] = {
    "$section": SectionMark,
    "$torch": TorchName,
    "$float": float,
    "$complex": lambda held: complex(float(held[0]), float(held[1])),
    "$bytes": lambda held: base64.b64decode(held),
    "$bytearray": lambda held: bytearray(base64.b64decode(held)),
    "$array": _decode_array,
    "$float64": _decode_float64,
}
