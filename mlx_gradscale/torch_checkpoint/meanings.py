"""What a placeholder means in plain Python, for the classes whose meaning is fixed."""

import datetime
import re
from collections.abc import Callable
from math import prod
from pathlib import PurePosixPath, PureWindowsPath
from typing import Any, Literal

import numpy as np

from .foreign import Placeholder
from .tensors import is_count

# Numbers, truth values, and text or bytes of a fixed length.
_CODE = re.compile(r"[biufcSU]\d{1,6}")
_ORDERS = frozenset("<>=|")


def plain_value(value: Any) -> Any:
    """Return what a placeholder stands for; itself where that is not known.

    A ``Namespace`` becomes a dict, a numpy scalar a number, a numpy array an array, a
    path, a date, a time or a duration its text.

    Args:
        value (Any): A placeholder; anything else is returned as it is.

    Example:

        >>> path = Placeholder.named("pathlib", "PosixPath").called(b"R", ("/", "a"))
        >>> plain_value(path)
        '/a'
    """
    if not isinstance(value, Placeholder) or value.is_name:
        return value
    read = _MEANINGS.get(value.callee.path) if value.callee else None
    try:
        found = read(value) if read else None
    except (ValueError, TypeError, OverflowError):  # not what the class itself writes
        return value
    return value if found is None else found


def _namespace(value: Placeholder) -> dict[Any, Any] | None:
    state = value.state
    return state if type(state) is dict and not value.args else None


def _path(flavour: type) -> Callable[[Placeholder], str | None]:
    def read(value: Placeholder) -> str | None:
        args = value.args or ()
        texts = len(args) < 100 and all(type(x) is str for x in args)
        return str(flavour(*args)) if texts else None

    return read


def _dtype(value: Any) -> np.dtype[Any] | None:
    known = isinstance(value, Placeholder) and value.path == "numpy.dtype"
    if not known or not value.args or type(value.args[0]) is not str:
        return None
    state = value.state
    order = state[1] if type(state) is tuple and len(state) > 1 else "="
    if not _CODE.fullmatch(value.args[0]) or order not in _ORDERS:
        return None
    return np.dtype(order + value.args[0])


def _scalar(value: Placeholder) -> Any:
    dtype, data = value.args or ()
    dtype = _dtype(dtype)
    if dtype is None or type(data) is not bytes or len(data) != dtype.itemsize:
        return None
    return np.frombuffer(data, dtype)[0].item()


def _array(
    dtype: Any, shape: Any, data: Any, order: Literal["C", "F"]
) -> np.ndarray[Any, Any] | None:
    dtype = _dtype(dtype)
    fits = type(shape) is tuple and len(shape) <= 32 and all(map(is_count, shape))
    if dtype is None or not fits or not isinstance(data, (bytes, bytearray)):
        return None
    if not dtype.itemsize or prod(shape) * dtype.itemsize != len(data):
        return None
    flat = np.frombuffer(bytes(data), dtype)
    made: np.ndarray[Any, Any] = flat.reshape(shape, order=order)
    return made


def _reconstructed(value: Placeholder) -> np.ndarray[Any, Any] | None:
    _version, shape, dtype, is_fortran, data = value.state
    return _array(dtype, shape, data, "F" if is_fortran is True else "C")


def _from_buffer(value: Placeholder) -> np.ndarray[Any, Any] | None:
    data, dtype, shape, order = value.args or ()
    return _array(dtype, shape, data, "F" if order == "F" else "C")


def _date(value: Placeholder) -> str | None:
    (data,) = value.args or ()
    if type(data) is not bytes or len(data) != 4:
        return None
    return str(datetime.date(data[0] * 256 + data[1], data[2], data[3]))


def _time(value: Placeholder) -> str | None:
    data, *zone = value.args or ()
    if type(data) is not bytes or len(data) != 6:
        return None
    return str(datetime.time(*_clock(data), tzinfo=_zone(zone)))


def _datetime(value: Placeholder) -> str | None:
    data, *zone = value.args or ()
    if type(data) is not bytes or len(data) != 10:
        return None
    # The month's highest bit is the hour that comes twice when clocks are set back.
    day = data[0] * 256 + data[1], data[2] & 0x7F, data[3]
    return str(datetime.datetime(*day, *_clock(data[4:]), tzinfo=_zone(zone)))


def _clock(data: bytes) -> tuple[int, int, int, int]:
    return data[0] & 0x7F, data[1], data[2], int.from_bytes(data[3:6], "big")


def _zone(found: list[Any]) -> datetime.timezone | None:
    if not found or found[0] is None:
        return None
    (zone,) = found
    if isinstance(zone, Placeholder) and zone.path == "datetime.timezone":
        offset, *_ = zone.args or ()
        return datetime.timezone(_delta(offset))
    raise ValueError("a time zone that is not known")


def _delta(value: Any) -> datetime.timedelta:
    known = isinstance(value, Placeholder) and value.path == "datetime.timedelta"
    args = value.args if known else None
    if args is None or not all(type(part) is int for part in args):
        raise ValueError("a duration that is not known")
    return datetime.timedelta(*args)


_MEANINGS: dict[str, Callable[[Placeholder], Any]] = {
    "argparse.Namespace": _namespace,
    "types.SimpleNamespace": _namespace,
    "datetime.date": _date,
    "datetime.time": _time,
    "datetime.datetime": _datetime,
    "datetime.timedelta": lambda value: str(_delta(value)),
}
for _core in ("numpy.core", "numpy._core"):
    _MEANINGS |= {
        f"{_core}.multiarray.scalar": _scalar,
        f"{_core}.multiarray._reconstruct": _reconstructed,
        f"{_core}.numeric._frombuffer": _from_buffer,
    }
for _module in ("pathlib", "pathlib._local"):
    for _kind in ("Path", "PosixPath", "PurePosixPath", "PurePath"):
        _MEANINGS[f"{_module}.{_kind}"] = _path(PurePosixPath)
    for _kind in ("WindowsPath", "PureWindowsPath"):
        _MEANINGS[f"{_module}.{_kind}"] = _path(PureWindowsPath)
