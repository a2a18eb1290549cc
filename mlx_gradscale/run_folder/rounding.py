"""Weights in half precision: what the cast loses, and how it is found again.

Without it a run that trained in float16 would go back with its frozen weights and
BatchNorm's statistics rounded to 11 bits, though no step changed them, and a weight
beyond 65504 would be loaded as inf.
"""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx

from ..files.arrays import read_arrays
from ..files.text import dtype_name
from .contents import MODEL


@dataclass(frozen=True)
class Rounded:
    """Where to find what a cast to half precision lost.

    Attributes:
        folder (Path): Of the run that was loaded.
        names (tuple): Of the weights that were rounded and have no master.
    """

    folder: Path
    names: tuple[str, ...] = ()


def cast_weights(
    weights: Mapping[str, mx.array], dtypes: Mapping[str, mx.Dtype]
) -> dict[str, mx.array]:
    """Cast floating weights to the model's dtypes.

    Args:
        weights (dict): By name.
        dtypes (dict): Of the names that are to be cast.

    Raises:
        ValueError: If a finite number would become infinite; it names the weight.

    Example:
        >>> cast_weights({"w": mx.array([0.1])}, {"w": mx.float16})["w"]
        array([0.0999756], dtype=float16)
    """
    return {
        name: _cast(name, array, dtypes[name])
        if name in dtypes and mx.issubdtype(array.dtype, mx.floating)
        else array
        for name, array in weights.items()
    }


def lost(weights: Mapping[str, mx.array], cast: Mapping[str, mx.array]) -> list[str]:
    """Return the names of the weights that the cast rounded."""
    return [
        name
        for name, array in weights.items()
        if not _equal(cast[name].astype(array.dtype), array)
    ]


def unrounded(
    weights: Mapping[str, mx.array],
    trained: Mapping[str, mx.array],
    folder: Path,
    rounded: Rounded | None,
) -> dict[str, mx.array]:
    """Return the weights, with the originals of those that are still their rounding.

    Args:
        weights (dict): The model's.
        trained (dict): Those that have masters; they are left as they are.
        folder (Path): With a run that may hold the originals.
        rounded (Rounded, optional): Another such folder, and the weights that were
            rounded when it was loaded.
    """
    rounded = rounded or Rounded(folder)
    found = [_originals(place) for place in dict.fromkeys((rounded.folder, folder))]
    out, missing = dict(weights), []
    for name, value in weights.items():
        if name in trained or not mx.issubdtype(value.dtype, mx.floating):
            continue
        wider = [w[name] for w in found if name in w and _is_wider(w[name], value)]
        for original in wider:
            if _equal(original.astype(value.dtype), value):
                out[name] = original
                break
        else:
            # BatchNorm's statistics moved on: their value, in the dtype they had.
            out[name] = value.astype(wider[0].dtype) if wider else value
            if not wider and name in rounded.names:
                missing.append(name)
    if missing:
        warnings.warn(
            f"{len(missing)} weights that were not trained are saved as rounded by "
            f"load_run ({', '.join(missing[:4])}, ...): {rounded.folder}, which "
            "held them exactly, no longer does.",
            stacklevel=4,
        )
    return out


def _cast(name: str, array: mx.array, dtype: mx.Dtype) -> mx.array:
    cast = array.astype(dtype)
    if mx.any(mx.isinf(cast) & mx.isfinite(array)).item():
        most = mx.max(mx.abs(mx.where(mx.isfinite(array), array, 0))).item()
        raise ValueError(
            f"{name} holds {most:g}, beyond {dtype_name(dtype)}'s "
            f"largest ({mx.finfo(dtype).max:g}): keep its layer in float32 "
            "(set_dtype(mx.float32) on it), or load without loss_scaling."
        )
    return cast


def _originals(folder: Path) -> dict[str, mx.array]:
    try:
        path = folder / MODEL
        return read_arrays(path)[0] if path.exists() else {}
    except ValueError:  # not a safetensors file: it is replaced, not needed
        return {}


def _equal(a: mx.array, b: mx.array) -> bool:
    return bool(mx.array_equal(a, b, equal_nan=True).item())


def _is_wider(original: mx.array, value: mx.array) -> bool:
    floating = mx.issubdtype(original.dtype, mx.floating)
    wider = floating and original.dtype.size > value.dtype.size
    return wider and original.shape == value.shape
