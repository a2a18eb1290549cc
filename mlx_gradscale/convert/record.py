"""What ``training.json`` must look like: it is checked when it is read.

A schema is a function that raises, or plain data to be looked through: ``[schema]``
for a list of such values, ``{"key": schema}`` for a dict with these keys (those that
end in ``?`` may be missing, others may be there too), ``{str: schema}`` for a dict
with texts as keys.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any

import mlx.core as mx

from ..files.paths import check_name
from ..formats import FORMATS
from .layouts import LAYOUTS
from .optimizers import ROWS
from .optimizers.valid import check_group, check_setting
from .sections import Part
from .shards import check_shards

# Only a live run's record has these (see passed and rounding): not a file.
LIVE = ("read", "pattern", "rounded")
_LARGEST_INT = 2**53  # what a float holds exactly
# PyTorch's files are read to a depth of 128 (torch_checkpoint.Limits).
_DEEPEST = 160


class RunError(ValueError):
    """A folder that is no run, or whose files are damaged, and why."""


def check_record(record: Mapping[str, Any]) -> None:
    """Raises :class:`RunError` on a record that could not be used.

    Args:
        record: as decoded; keys that this package does not know may be there.

    Example:
        >>> check_record({"folder": "yes"})
        Traceback (most recent call last):
        ...
        mlx_gradscale.convert.record.RunError: folder must be true or false, not 'yes'
    """
    for key in LIVE:
        if key in record:
            raise RunError(f"{key} is not for files")
    for _ in _values(record):
        pass  # the depth is checked
    _check(record, _RECORD, "")
    if record.get("used") is not None:
        _check_used(record["used"])
    if "model" in record:
        _check_model(record["model"])
    if "optimizer" in record:
        _check_optimizer(record)
    if "checkpoint" in record:
        _check_parts(record)
    for name in (*record.get("carried", ()), *record.get("several", ())):
        check_name(name, "it")
    if "several" in record:
        _need("checkpoint" in record, "several", "of a checkpoint", record["several"])
    check_shards(record.get("shards", {}))


def _check(value: Any, schema: Any, where: str) -> None:
    if callable(schema):
        schema(value, where)
    elif isinstance(schema, list):
        _need(isinstance(value, (list, tuple)), where, "a list", value)
        for i, item in enumerate(value):
            _check(item, schema[0], f"{where}.{i}")
    elif str in schema:
        _need(isinstance(value, Mapping), where, "a dict", value)
        for key, item in value.items():
            _need(type(key) is str, where, "a dict of texts", key)
            _check(item, schema[str], f"{where}.{key}")
    else:
        _need(isinstance(value, Mapping), where, "a dict", value)
        for key, inner in schema.items():
            name = key.rstrip("?")
            place = f"{where}.{name}".lstrip(".")
            if name in value:
                _check(value[name], inner, place)
            elif name == key:
                raise RunError(f"{place} is missing")


def _need(is_right: bool, where: str, what: str, value: Any) -> None:
    if not is_right:
        shown = repr(value)
        shown = shown if len(shown) <= 60 else f"{shown[:57]}..."
        raise RunError(f"{where} must be {what}, not {shown}")


def _kind(what: str, *kinds: type) -> Callable[[Any, str], None]:
    def check(value: Any, where: str) -> None:
        _need(type(value) in kinds, where, what, value)

    return check


def _one_of(known: Mapping[str, Any]) -> Callable[[Any, str], None]:
    def check(value: Any, where: str) -> None:
        is_known = isinstance(value, Hashable) and value in known
        _need(is_known, where, f"one of {', '.join(known)}", value)

    return check


def _anything(value: Any, where: str) -> None:
    pass


def _count(value: Any, where: str) -> None:
    fits = type(value) is int and 0 <= value <= _LARGEST_INT
    _need(fits, where, "a count", value)


def _counts(value: Any, where: str) -> None:
    _check(value, [_count], where)
    _need(bool(value), where, "a list of counts", value)


def _index(value: Any, where: str) -> None:
    _need(type(value) in (int, str), where, "a number or a text", value)


def _states(value: Any, where: str) -> None:
    _need(isinstance(value, Mapping), where, "a dict", value)
    for key, state in value.items():
        _index(key, where)
        _need(isinstance(state, Mapping), f"{where}.{key}", "a dict", state)


def _bytes(value: Any, where: str) -> None:
    fits = isinstance(value, mx.array) and value.dtype == mx.uint8 and value.ndim == 1
    _need(fits, where, "bytes", value)


_text, _flag = _kind("a text", str), _kind("true or false", bool)
_dict = _kind("a dict", dict)
_RECORD = {
    "checkpoint?": _anything,
    "folder?": _flag,
    "model?": {
        "order": [_text],
        "entries": {str: {"mlx": [_text], "layout": _one_of(LAYOUTS)}},
        "tied": {str: _text},
        "aside": {str: _anything},
        "ordered": _flag,
        "metadata": _anything,
    },
    "optimizer?": {
        "name": _one_of(ROWS),
        "joined": _flag,
        "groups": [{"params": [_index]}],
        "indices?": [[_index]],
        "names": [[_text]],
        "aside?": _states,
        "steps": [_count],
        "step_like": _one_of(dict.fromkeys(("scalar", "vector", "int", "float"))),
        "fresh": {str: {str: _anything}},
        "extra?": _dict,
        "flat?": _flag,
    },
    "scaler?": {"format": _one_of(FORMATS)},
    "carried?": {str: _bytes},
    "shards?": {str: {"metadata": _dict, "files": {str: _text}}},
    "several?": [_text],
    "changed?": {str: _counts},
}


def _check_model(model: Mapping[str, Any]) -> None:
    entries, tied, aside = model["entries"], model["tied"], model["aside"]
    for name, entry in entries.items():
        count, parts = len(entry["mlx"]), LAYOUTS[entry["layout"]].parts
        fits = count and count % parts == 0
        _need(fits, f"model.entries.{name}", f"{parts} names", entry["mlx"])
    for alias, name in tied.items():
        _need(name in entries, f"model.tied.{alias}", "the name of a tensor", name)
    for name in model["order"]:
        known = name in entries or name in tied or name in aside
        _need(known, "model.order", "of names that are known", name)


def _check_optimizer(record: Mapping[str, Any]) -> None:
    mine = record["optimizer"]
    groups, row = mine["groups"], ROWS[mine["name"]]
    _need(bool(groups), "optimizer.groups", "at least one", groups)
    for i, group in enumerate(groups):
        for key in group:
            _need(type(key) is str, f"optimizer.groups.{i}", "a dict of texts", key)
        check_group(mine["name"], group)
        for key in row.settings:
            has = key in group
            _need(has, f"optimizer.groups.{i}", f"a dict with {key}", sorted(group))
        indices = mine["indices"][i : i + 1] if "indices" in mine else [group["params"]]
        names = mine["names"][i : i + 1]
        fits = bool(indices) and [len(x) for x in indices] == [len(x) for x in names]
        _need(fits, f"optimizer.names.{i}", "one for each parameter", names)
    _need(len(mine["steps"]) == len(groups), "optimizer.steps", "one for each group",
          mine["steps"])  # fmt: skip
    _need("model" in record, "optimizer", "beside a model", sorted(record))
    entries = record["model"]["entries"]
    for name in (name for names in mine["names"] for name in names):
        _need(name in entries, "optimizer.names", "names of the model", name)
    if record.get("used"):
        wanted = 1 if mine["joined"] else len(groups)
        _need(len(record["used"]) >= wanted, "used", f"{wanted} dicts", record["used"])


def _check_used(used: Any) -> None:
    _check(used, [{"class?": _text, "schedule?": _flag, "constant?": _flag}], "used")
    for i, part in enumerate(used):
        for key in part.keys() - {"class", "schedule", "constant"}:
            check_setting(key, part[key], f"used.{i}.{key}")


def _check_parts(record: Mapping[str, Any]) -> None:
    extra = record.get("optimizer", {}).get("extra")
    for value in _values([record["checkpoint"], extra]):
        if isinstance(value, Part):
            number, _, part = value.rpartition("/")
            known = part in ("model", "optimizer", "scaler")
            if "several" in record:
                runs = map(str, range(len(record["several"])))
                known = known and number in runs
            else:
                known = known and not number and value in record
            _need(known, "checkpoint", "of parts that the record has", str(value))


def _values(value: Any) -> Iterator[Any]:
    """All values inside a value, without recursion; they may not be too deep."""
    left = [(value, 0)]
    while left:
        value, depth = left.pop()
        yield value
        if depth > _DEEPEST:
            raise RunError(f"it is nested more than {_DEEPEST} times")
        if isinstance(value, Mapping):
            left += ((inner, depth + 1) for inner in value.values())
        elif isinstance(value, (list, tuple)):
            left += ((inner, depth + 1) for inner in value)
