"""Plain Python values as JSON and back, without losing a type.

JSON has no tuples, no keys but strings, no NaN, no tensors. Each of these becomes
an object with one ``$`` key; everything else is written as it is, so that the file
stays readable.
"""

import base64
import math
from collections import Counter, OrderedDict
from typing import Any

import mlx.core as mx
import numpy as np

from .parts import Part

# Up to here a tensor is written in the JSON itself (a BatchNorm counter, say).
_MOST_INLINE = 16
_SEQUENCES = {"$tuple": tuple, "$set": set, "$frozenset": frozenset}
_MAPPINGS = {"$dict": dict, "$ordered": OrderedDict, "$counter": Counter}


def encode(value: Any, tensors: dict[str, mx.array], name: str = "") -> Any:
    """Makes a value that ``json.dumps`` takes.

    Args:
        value: nested containers, Python values, arrays.
        tensors: receives the larger arrays, by the name the JSON refers to.
        name: where the value is; names its arrays.

    Returns:
        the JSON value.

    Example:
        >>> encode({"betas": (0.9, 0.99), 1: float("nan")}, {})
        {'$dict': [['betas', {'$tuple': [0.9, 0.99]}], [1, {'$float': 'nan'}]]}
    """
    if value is None or isinstance(value, (bool, int)):
        return value
    if isinstance(value, Part):
        return {"$part": str(value)}
    if isinstance(value, str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"$float": str(value)}
    if isinstance(value, complex):
        return {"$complex": [str(value.real), str(value.imag)]}
    if isinstance(value, (bytes, bytearray)):
        kind = "$bytes" if isinstance(value, bytes) else "$bytearray"
        return {kind: base64.b64encode(value).decode()}
    if isinstance(value, mx.array):
        return _encode_array(value, tensors, name)
    if type(value) is list:
        return [encode(v, tensors, f"{name}.{i}") for i, v in enumerate(value)]
    for tag, kind in _SEQUENCES.items():
        if type(value) is kind:
            return {tag: encode(list(value), tensors, name)}
    for tag, kind in _MAPPINGS.items():
        if type(value) is kind:
            return _encode_mapping(value, tag, tensors, name)
    raise TypeError(
        f"{name or 'The checkpoint'} is a {type(value).__name__}, which cannot be "
        "written to training.json: leave it out of the checkpoint."
    )


def decode(value: Any, tensors: dict[str, mx.array]) -> Any:
    """The value that :func:`encode` was given.

    Example:
        >>> decode(encode((1, {"x": b"ab"}), {}), {})
        (1, {'x': b'ab'})
    """
    if isinstance(value, list):
        return [decode(v, tensors) for v in value]
    if not isinstance(value, dict):
        return value
    if len(value) != 1 or not next(iter(value)).startswith("$"):
        return {key: decode(v, tensors) for key, v in value.items()}
    ((tag, held),) = value.items()
    if tag in _SEQUENCES:
        return _SEQUENCES[tag](decode(held, tensors))
    if tag in _MAPPINGS:
        pairs = held.items() if isinstance(held, dict) else held
        return _MAPPINGS[tag](
            {_key(decode(k, tensors)): decode(v, tensors) for k, v in pairs}
        )
    if tag in _LEAVES:
        return _LEAVES[tag](held)
    if tag == "$tensor":
        if held not in tensors:
            raise ValueError(f"training.json refers to a missing tensor {held!r}.")
        return tensors[held]
    raise ValueError(f"training.json holds {tag!r}, which is not known here.")


def _encode_mapping(
    value: dict, tag: str, tensors: dict[str, mx.array], name: str
) -> Any:
    plain = all(isinstance(key, str) and not key.startswith("$") for key in value)
    if not plain:
        pairs = [
            [encode(k, tensors, f"{name}.key"), encode(v, tensors, f"{name}.{k}")]
            for k, v in value.items()
        ]
        return {tag: pairs}
    inner = {k: encode(v, tensors, f"{name}.{k}") for k, v in value.items()}
    return inner if tag == "$dict" else {tag: inner}


def _encode_array(value: mx.array, tensors: dict[str, mx.array], name: str) -> Any:
    dtype = str(value.dtype).removeprefix("mlx.core.")
    if dtype == "float64":  # MLX's safetensors have none
        data = base64.b64encode(np.array(value).astype("<f8").tobytes()).decode()
        return {"$float64": {"shape": value.shape, "data": data}}
    inline = value.size <= _MOST_INLINE and dtype != "complex64"
    if inline and bool(mx.all(mx.isfinite(value)).item()):
        data = value.reshape(-1).tolist()
        return {"$array": {"dtype": dtype, "shape": value.shape, "data": data}}
    name = name.lstrip(".") or "value"
    while name in tensors and tensors[name] is not value:
        name += "_"
    tensors[name] = value
    return {"$tensor": name}


def _key(key: Any) -> Any:
    if isinstance(key, (list, dict, mx.array)):
        raise ValueError(f"training.json holds {key!r} as the key of a dict.")
    return key


def _decode_array(held: dict[str, Any]) -> mx.array:
    dtype = getattr(mx, "bool_" if held["dtype"] == "bool" else held["dtype"], None)
    if not isinstance(dtype, mx.Dtype):
        raise ValueError(f"training.json names the dtype {held['dtype']!r}.")
    return mx.array(held["data"], dtype).reshape(held["shape"])


def _decode_float64(held: dict[str, Any]) -> mx.array:
    data = np.frombuffer(base64.b64decode(held["data"]), "<f8")
    return mx.array(data.reshape(held["shape"]), mx.float64)


_LEAVES = {
    "$part": Part,
    "$float": float,
    "$complex": lambda held: complex(float(held[0]), float(held[1])),
    "$bytes": lambda held: base64.b64decode(held),
    "$bytearray": lambda held: bytearray(base64.b64decode(held)),
    "$array": _decode_array,
    "$float64": _decode_float64,
}
