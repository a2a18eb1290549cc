"""What a record must look like in ``training.json``: it is checked when it is read.

A schema is a function that raises, or plain data to be looked through: ``[schema]``
for a list of such values, ``{"key": schema}`` for a dict with these keys (those that
end in ``?`` may be missing, others may be there too), ``{str: schema}`` for a dict
with texts as keys.
"""

from collections.abc import Callable, Hashable, Mapping
from typing import Any

import mlx.core as mx

from ..files.paths import check_name
from ..files.shards import check_shards
from ..formats import FORMATS
from ..run_folder.contents import RunError
from ..run_folder.values import SectionMark, each_value
from .layouts import LAYOUTS
from .optimizers import ROWS
from .optimizers.valid import check_group, check_setting

_LARGEST_INT = 2**53  # what a float holds exactly


def check_training(record: Mapping[str, Any], runs: int = 0) -> None:
    """Raise :class:`RunError` on a record that could not be used.

    Args:
        record (dict): As decoded; other keys may be there.
        runs (int): How many the folder holds, if several.

    Example:
        >>> check_training({"folder": 1})
        Traceback (most recent call last):
        ...
        mlx_gradscale.run_folder.contents.RunError: folder must be true or false, not 1
    """
    _check(record, _RECORD, "")
    if record.get("used") is not None:
        _check_used(record["used"])
    if "model" in record:
        _check_model(record["model"])
    if "optimizer" in record:
        _check_optimizer(record)
    if "checkpoint" in record:
        _check_marks(record, runs)
    for name in record.get("carried", ()):
        check_name(name, "it")
    if runs:
        _need("checkpoint" in record, "several", "of a checkpoint", runs)
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
        "unplaced": {str: _anything},
        "ordered": _flag,
        "metadata": _anything,
    },
    "optimizer?": {
        "name": _one_of(ROWS),
        "joined": _flag,
        "groups": [{"params": [_index]}],
        "indices": [[_index]],
        "names": [[_text]],
        "unplaced": _states,
        "steps": [_count],
        "step_like": _one_of(dict.fromkeys(("scalar", "vector", "int", "float"))),
        "fresh": {str: {str: _anything}},
        "extra?": _dict,
        "flat?": _flag,
    },
    "scaler?": {"format": _one_of(FORMATS)},
    "carried?": {str: _bytes},
    "shards?": {str: {"metadata": _dict, "files": {str: _text}}},
}


def _check_model(model: Mapping[str, Any]) -> None:
    entries, tied, unplaced = model["entries"], model["tied"], model["unplaced"]
    for name, entry in entries.items():
        names, count = len(entry["mlx"]), LAYOUTS[entry["layout"]].count
        fits = names > 0 and names % count == 0
        _need(fits, f"model.entries.{name}", f"{count} names", entry["mlx"])
    for alias, name in tied.items():
        _need(name in entries, f"model.tied.{alias}", "the name of a tensor", name)
    for name in model["order"]:
        known = name in entries or name in tied or name in unplaced
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
        indices, names = mine["indices"][i : i + 1], mine["names"][i : i + 1]
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
    _check(used, [{"class": _text, "schedule": _flag, "constant?": _flag}], "used")
    for i, part in enumerate(used):
        rows = [r for r in ROWS.values() if r.mlx.__name__ == part["class"]]
        names = ({*row.settings.values(), *row.fixed} for row in rows)
        for key in part.keys() & {"learning_rate"}.union(*names):
            check_setting(key, part[key], f"used.{i}.{key}")


def _check_marks(record: Mapping[str, Any], runs: int) -> None:
    extra = record.get("optimizer", {}).get("extra")
    for value in each_value([record["checkpoint"], extra]):
        if isinstance(value, SectionMark):
            number, _, section = value.rpartition("/")
            known = section in ("model", "optimizer", "scaler")
            if runs:
                known = known and number in map(str, range(runs))
            else:
                known = known and not number and value in record
            _need(known, "checkpoint", "of sections that it has", str(value))
