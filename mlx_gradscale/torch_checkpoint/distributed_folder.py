"""Read the folders of torch.distributed.checkpoint, however many ranks wrote them.

``.metadata`` is a pickle that tells which values there are, and for each tensor the
pieces it is in: their offsets, and where in which ``.distcp`` file each one is. A piece
is what ``torch.save`` writes. One budget is for the whole folder, and no two pieces
may lie in the same bytes, so that a small folder cannot ask for much.
"""

import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx

from ..files.locks import open_file
from ..files.paths import check_name
from .foreign import Placeholder
from .limits import DEFAULT_LIMITS, Budget, CheckpointError, Limits
from .pickle_reader import PickleReader
from .reader import check_float64, load_within
from .source import open_source
from .tensors import is_count
from .tree import TreeFinisher, written_limit

_METADATA, _PIECES = ".metadata", ".distcp"
_DAMAGED = (
    "The folder's .metadata is damaged, or of a PyTorch that writes it otherwise."
)


class _Extent(NamedTuple):
    """Where a piece is."""

    file: str
    start: int
    length: int


class _Node(dict[Any, Any]):
    """A dict or list of the checkpoint, while it is filled."""


def is_distributed(folder: str | os.PathLike[str]) -> bool:
    """Tell whether torch.distributed.checkpoint wrote this folder."""
    folder = Path(folder)
    return (folder / _METADATA).is_file() and any(folder.glob(f"*{_PIECES}"))


def load_distributed(
    folder: str | os.PathLike[str],
    *,
    float64: mx.Dtype | None = None,
    limits: Limits = DEFAULT_LIMITS,
) -> Any:
    """Read a folder of ``torch.distributed.checkpoint``, as ``load`` reads a file.

    Tensors that ranks hold in shards are put together. The result is what PyTorch's
    ``dcp_to_torch`` makes of the folder: keys of dicts that were numbers are texts.

    Args:
        folder (str): The folder.
        float64 (Dtype, optional): As for ``load``.
        limits (Limits, optional): How much the folder may ask for.

    Raises:
        CheckpointError: It is damaged, hostile, or holds what cannot be read.
    """
    check_float64(float64)
    folder = Path(folder)
    # A piece holds its tensor and no more: nothing is repeated or expanded.
    budget = Budget(replace(limits, extra_bytes=0))
    metadata = _attributes(_read_metadata(folder / _METADATA, budget))
    kinds, stored = metadata.get("state_dict_metadata"), metadata.get("storage_data")
    paths = metadata.get("planner_data")
    if type(kinds) is not dict or type(stored) is not dict:
        raise CheckpointError(_DAMAGED)
    places = _places(stored)
    values: dict[str, Any] = {}

    def read(piece: _Extent) -> Any:
        with open_source(folder / piece.file) as source:
            data = source.read(piece.start, piece.length, piece.file)
        # A zip file each; the older format may take from the budget and give back.
        if not data.startswith(b"PK\x03\x04"):
            raise CheckpointError(f"{piece.file} is damaged; copy it again.")
        return load_within(data, budget, float64)

    for name, kind in kinds.items():
        held, shape = places.get(name, {}), _attributes(kind).get("size")
        try:
            parts = {offset: read(piece) for offset, piece in held.items()}
            if shape is None:
                (values[name],) = parts.values()
            else:
                values[name] = _whole(parts, shape)
        except ValueError as error:
            raise CheckpointError(f"{name!a:.80}: {error}") from error
    return _nested(values, paths if type(paths) is dict else {}, limits.depth)


def _read_metadata(path: Path, budget: Budget) -> Any:
    with open(path, "rb", opener=open_file) as file:
        data = file.read(budget.limits.pickle_bytes + 1)
    if len(data) > budget.limits.pickle_bytes:
        raise CheckpointError(f"{path} is larger than limits.pickle_bytes.")
    reader = PickleReader(data, 0, _no_storage, budget)
    value = reader.read()
    most = written_limit(len(data), budget.limits)
    walk = TreeFinisher(_no_storage, budget.limits, reader.shared, most)
    return walk.finish(value)


def _no_storage(_: Any) -> Any:
    raise CheckpointError(_DAMAGED)


def _attributes(value: Any) -> dict[Any, Any]:
    """Return the state of an object of PyTorch's, by attribute."""
    state = value.state if isinstance(value, Placeholder) else None
    # An object without attributes, as of BytesStorageMetadata, has no state.
    if not isinstance(value, Placeholder) or type(state) not in (dict, type(None)):
        raise CheckpointError(_DAMAGED)
    return state or {}


def _places(stored: Mapping[Any, Any]) -> dict[str, dict[Any, _Extent]]:
    """Return the pieces of each value by their offset in it."""
    places: dict[str, dict[Any, _Extent]] = {}
    for key, value in stored.items():
        index, info = _attributes(key), _attributes(value)
        if info.get("transform_descriptors"):
            raise CheckpointError(
                "The folder is compressed: save it without transforms, or make it one "
                "file where PyTorch is, by python -m torch.distributed.checkpoint."
                "format_utils dcp_to_torch FOLDER FILE."
            )
        name, offset = index.get("fqn"), index.get("offset")
        start: Any = info.get("offset")
        length: Any = info.get("length")
        is_offset = offset is None or _is_shape(offset)
        if type(name) is not str or not is_offset:
            raise CheckpointError(_DAMAGED)
        if not is_count(start) or not is_count(length):
            raise CheckpointError(_DAMAGED)
        file = check_name(info.get("relative_path"), _METADATA)
        if not file.endswith(_PIECES):
            raise CheckpointError(f"{_METADATA} names {file!a:.80}, no {_PIECES} file.")
        held = places.setdefault(name, {})
        if offset in held:
            raise CheckpointError(_DAMAGED)
        held[offset] = _Extent(file, start, length)
    _refuse_overlaps(piece for held in places.values() for piece in held.values())
    return places


def _refuse_overlaps(pieces: Iterable[_Extent]) -> None:
    end: dict[str, int] = {}
    for file, start, length in sorted(pieces):
        if start < end.get(file, 0):
            raise CheckpointError(f"Two pieces lie in the same bytes of {file}.")
        end[file] = start + length


def _is_shape(value: Any) -> bool:
    return isinstance(value, tuple) and all(map(is_count, value))


def _whole(parts: Mapping[Any, Any], shape: Any) -> mx.array:
    """Return the tensor that pieces make up, which must fit without a gap."""
    arrays = list(parts.values())
    fits = _is_shape(shape) and all(isinstance(x, mx.array) for x in arrays)
    fits = fits and all(
        x.ndim == len(shape) and x.dtype == arrays[0].dtype for x in arrays
    )
    fits = fits and all(_is_shape(o) and len(o) == len(shape) for o in parts)
    if not arrays or not fits:
        raise CheckpointError(_DAMAGED)
    # A rank may have nothing of a short tensor.
    filled = [(offset, x) for offset, x in parts.items() if x.size]
    whole = _joined(filled, 0) if filled else arrays[0]
    if whole.shape != tuple(shape):
        raise CheckpointError(f"its pieces make {whole.shape}, not {tuple(shape)}.")
    mx.eval(whole)
    return whole


def _joined(parts: list[tuple[Any, mx.array]], axis: int) -> mx.array:
    if axis == parts[0][1].ndim:
        if len(parts) > 1:
            raise CheckpointError("two of its pieces are in one place.")
        return parts[0][1]
    rows: dict[int, list[tuple[Any, mx.array]]] = {}
    for offset, x in parts:
        rows.setdefault(offset[axis], []).append((offset, x))
    at, joined = 0, []
    for start, row in sorted(rows.items()):
        joined.append(_joined(row, axis + 1))
        if start != at:
            raise CheckpointError("its pieces do not fit together.")
        at += joined[-1].shape[axis]
    others = {x.shape[:axis] + x.shape[axis + 1 :] for x in joined}
    if len(others) > 1:
        raise CheckpointError("its pieces do not fit together.")
    return joined[0] if len(joined) == 1 else mx.concatenate(joined, axis)


def _nested(values: Mapping[str, Any], paths: Mapping[Any, Any], depth: int) -> Any:
    """Return the checkpoint of values by their flattened names."""
    root = _Node()
    for name, value in values.items():
        path = paths.get(name, (name,))
        plain = type(path) is tuple and all(type(k) is str or is_count(k) for k in path)
        if not plain or not 0 < len(path) <= depth:
            raise CheckpointError(_DAMAGED)
        node = root
        for key in path[:-1]:
            node = node.setdefault(key, _Node())
            if type(node) is not _Node:
                raise CheckpointError(_DAMAGED)
        if path[-1] in node:
            raise CheckpointError(_DAMAGED)
        node[path[-1]] = value
    return _finished(root)


def _finished(node: Any) -> Any:
    if type(node) is not _Node:
        return node
    if all(type(key) is str for key in node):
        return {key: _finished(value) for key, value in node.items()}
    # Numbers are places in a list.
    if node.keys() != set(range(len(node))):
        raise CheckpointError("A list of the folder lacks some of its items.")
    return [_finished(node[i]) for i in range(len(node))]
