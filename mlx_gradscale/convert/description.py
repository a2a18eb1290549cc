"""What is in a checkpoint file or folder, as data and as text."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from .. import state_files
from ..files.arrays import read_arrays
from ..files.text import dtype_name, natural_order, printable, shape, size, table
from ..run_folder.contents import OPTIMIZER, TRAINING
from ..run_folder.values import SectionMark
from ..torch_checkpoint import Placeholder, plain_value
from ..torch_checkpoint.foreign import PlacedTensor
from . import optimizers
from .flat_optimizer import unflattened
from .folder import read_run
from .foreign import plain_section
from .optimizers import number
from .optimizers.valid import check_state_dict
from .passthrough import leaves
from .resume import current_groups
from .run import Run
from .sections import SectionsError, find_sections, is_scaler
from .skeleton import cut, get
from .torch_folder import read_torch


def describe(path: str | Path) -> dict[str, Any]:
    """Tell what is in a ``.pt`` or ``.safetensors`` file, a scaler's file or a folder.

    Args:
        path (str or Path): The file or folder.

    Returns:
        dict: Ready for JSON: ``kind``, ``tensors`` (name, shape, dtype, bytes),
        ``optimizer``, ``scaler`` and ``rest``, those that are there.

    Example:
        >>> import os, tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = os.path.join(folder, "model.safetensors")
        ...     mx.save_safetensors(path, {"w": mx.zeros((2, 3))})
        ...     describe(path)["tensors"]
        [{'name': 'w', 'shape': [2, 3], 'dtype': 'float32', 'bytes': 24}]
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"There is no {path}.")
    if path.is_dir() and any((path / n).exists() for n in (TRAINING, OPTIMIZER)):
        found = _describe_run(path)
    elif path.suffix == ".safetensors":
        found = _describe_safetensors(path)
    elif path.name.endswith((".json", ".json.gz")):
        found = _describe_json(state_files.load_state(path))
    else:
        kind = "folder of PyTorch files" if path.is_dir() else "PyTorch checkpoint"
        # float64 is kept: nothing is computed here.
        found = {"kind": kind, **_describe_torch(read_torch(path, mx.float64)[0])}
    return {"path": str(path), **found}


def _describe_json(state: dict[str, Any]) -> dict[str, Any]:
    if is_scaler(state):
        return {"kind": "scaler state", "scaler": _plain(state)}
    return {"kind": "JSON, no scaler state", **_rest(state)}


def _describe_run(folder: Path) -> dict[str, Any]:
    run = read_run(folder)
    if run.runs:
        kind = f"several MLX runs, in folders of their own: {', '.join(run.runs)}"
        return {"kind": kind, **_rest(run.record.checkpoint)}
    found: dict[str, Any] = {"kind": "MLX run"}
    if run.weights is not None:
        found["tensors"] = _tensors(_sorted(run.weights))
    if run.optimizer is not None:
        found["optimizer"] = _flat_optimizer(run.optimizer)
        if run.record.optimizer:
            name = run.record.optimizer.name
            found["optimizer"] |= _groups(name, _run_groups(run))
    if run.scaler is not None:
        found["scaler"] = _plain(run.scaler)
    if run.record.checkpoint is not None:
        found |= _rest(run.record.checkpoint)
    return found


def _run_groups(run: Run) -> list[dict[str, Any]]:
    try:
        return current_groups(run)
    except ValueError:  # the state is another optimizer's: only the record is left
        recorded = run.record.optimizer.groups if run.record.optimizer else []
        return [{k: v for k, v in g.items() if k != "lr"} for g in recorded]


def _describe_safetensors(path: Path) -> dict[str, Any]:
    arrays, metadata = read_arrays(path)
    found: dict[str, Any] = {"kind": "safetensors"}
    found |= {"tensors": _tensors(_sorted(arrays))}
    if metadata:
        found["metadata"] = metadata
    if {"step", "learning_rate"} <= arrays.keys() or "states.0.step" in arrays:
        found["optimizer"] = _flat_optimizer(arrays)
    return found


def _describe_torch(checkpoint: Any) -> dict[str, Any]:
    try:
        sections = find_sections(checkpoint)
    except SectionsError:
        sections = {}  # several models, or none: the tensors are listed where they are
    found: dict[str, Any] = {}
    if "model" in sections:
        found["tensors"] = _tensors(get(checkpoint, sections["model"]))
    if "optimizer" in sections:
        try:
            state = plain_section("optimizer", get(checkpoint, sections["optimizer"]))
            found["optimizer"] = _torch_optimizer(unflattened(state))
        except SectionsError:  # it holds objects where numbers are: shown as it is
            del sections["optimizer"]
    if "scaler" in sections:
        found["scaler"] = _plain(get(checkpoint, sections["scaler"]))
    return found | _rest(cut(checkpoint, sections) if sections else checkpoint)


def _tensors(arrays: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Tell what each tensor is; a model's state may hold other values beside them."""
    return [
        {
            "name": name,
            "shape": list(array.shape),
            "dtype": dtype_name(array),
            "bytes": array.nbytes,
        }
        for name, array in arrays.items()
        if isinstance(array, mx.array)
    ]


def _sorted(arrays: Mapping[str, mx.array]) -> dict[str, mx.array]:
    """Sort by name: ``mx.load`` gives them in any order."""
    return {name: arrays[name] for name in sorted(arrays, key=natural_order)}


def _torch_optimizer(state: Mapping[str, Any]) -> dict[str, Any]:
    try:
        check_state_dict(state)
    except ValueError as error:
        return {"name": f"{error}", "steps": [], "slots": [], "bytes": 0}
    try:
        name = optimizers.recognise(state)
    except ValueError:
        name = "unknown"
    steps = {
        number(s["step"]) for s in state["state"].values() if s.get("step") is not None
    }
    slots = {k for s in state["state"].values() for k in s if k != "step"}
    arrays = [x for x in leaves(state["state"]) if isinstance(x, mx.array)]
    return {
        "steps": sorted(steps),
        "slots": sorted(slots),
        "bytes": sum(x.nbytes for x in arrays),
        **_groups(name, state["param_groups"]),
    }


def _groups(name: str, groups: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    said = []
    for group in groups:
        kept = {k: _plain(v) for k, v in group.items() if k != "param_names"}
        said.append({**kept, "params": len(group["params"])})
    return {"name": name, "groups": said}


def _flat_optimizer(flat: Mapping[str, mx.array]) -> dict[str, Any]:
    def ends(word: str) -> list[Any]:
        places = [k for k in _sorted(flat) if k == word or k.startswith("states.")]
        return [_plain(flat[k]) for k in places if k.rsplit(".", 1)[-1] == word]

    slots = {key.rsplit(".", 1)[-1] for key in flat} - {"step", "learning_rate"}
    return {
        "steps": ends("step"),
        "learning_rates": ends("learning_rate"),
        "slots": sorted(slots),
        "bytes": sum(array.nbytes for array in flat.values()),
    }


def _rest(skeleton: Any) -> dict[str, Any]:
    if isinstance(skeleton, SectionMark):
        return {}
    if isinstance(skeleton, mx.array):
        return {"tensors": _tensors({"the file itself": skeleton})}
    if isinstance(skeleton, (list, tuple)):
        skeleton = dict(enumerate(skeleton))
    if not isinstance(skeleton, Mapping):
        skeleton = {"the file itself": skeleton}
    skeleton = {k: v for k, v in skeleton.items() if not isinstance(v, SectionMark)}
    seen: set[int] = set()
    rest = {_key(k): _plain(v, seen) for k, v in skeleton.items()}
    return {"rest": rest} if rest else {}


def _plain(value: Any, seen: set[int] | None = None) -> Any:
    """Return JSON for people: a tensor by its shape, unless it is one number.

    Objects of other programs may hold themselves and each other: ``seen`` are those
    that were described, by id, and are only named after that.
    """
    seen = set() if seen is None else seen
    if isinstance(value, Placeholder):
        again = id(value) in seen
        seen.add(id(value))
        plain = plain_value(value)
        value = str(value) if again and isinstance(plain, Mapping) else plain
    if isinstance(value, Placeholder):
        return str(value)
    if isinstance(value, PlacedTensor):
        value = value.array
    if isinstance(value, mx.array):
        text = f"{dtype_name(value)} {shape(value)}"
        return _plain(value.item()) if value.size == 1 else text
    if isinstance(value, np.ndarray):
        return f"numpy {value.dtype.name} {'x'.join(map(str, value.shape)) or 'scalar'}"
    if isinstance(value, Mapping):
        return {_key(key): _plain(item, seen) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(item, seen) for item in value]
    if isinstance(value, (bytes, bytearray)):
        return f"{len(value)} bytes"
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)  # JSON has no word for it
    return value if isinstance(value, (str, int, float, type(None))) else str(value)


def _key(key: Any) -> str:
    return str(plain_value(key))


def render(found: Mapping[str, Any]) -> str:
    """Return the description as text.

    Example:
        >>> print(render({"path": "a.pt", "kind": "PyTorch checkpoint",
        ...               "rest": {"epoch": 3}}))
        a.pt: PyTorch checkpoint
        <BLANKLINE>
        epoch  3
    """
    lines = [printable(f"{found['path']}: {found['kind']}")]
    if not found.keys() - {"path", "kind"}:
        lines.append("It is empty.")
    if "tensors" in found:
        rows = [
            (t["name"], "x".join(map(str, t["shape"])) or "scalar", t["dtype"],
             size(t["bytes"]))
            for t in found["tensors"]
        ]  # fmt: skip
        count, total = len(rows), sum(t["bytes"] for t in found["tensors"])
        lines += ["", table(("tensor", "shape", "dtype", "size"), rows)]
        lines += [f"{count} tensors, {size(total)}"]
    if "optimizer" in found:
        lines += ["", *_optimizer_lines(found["optimizer"])]
    if "scaler" in found:
        lines += ["", table(("scaler", ""), found["scaler"].items())]
    for key in ("metadata", "rest"):
        if key in found:
            said = [(k, _short(v)) for k, v in found[key].items()]
            lines += ["", table(said[0], said[1:])]
    return "\n".join(lines)


def _optimizer_lines(optimizer: Mapping[str, Any]) -> list[str]:
    steps = ", ".join(map(_digits, optimizer["steps"])) or "none"
    slots = ", ".join(optimizer["slots"]) or "none"
    rows = [
        ("optimizer", optimizer.get("name", "an MLX optimizer")),
        ("step", steps),
        ("state", f"{slots}, {size(optimizer['bytes'])}"),
    ]
    if "learning_rates" in optimizer:
        rates = ", ".join(map(_digits, optimizer["learning_rates"]))
        rows.append(("learning rate", rates))
    for i, group in enumerate(optimizer.get("groups", ())):
        shown = {k: v for k, v in group.items() if k != "params" and v}
        said = ", ".join(f"{key}={value}" for key, value in shown.items())
        rows.append((f"group {i}", f"{group['params']} parameters, {said}"))
    return table(rows[0], rows[1:]).splitlines()


def _digits(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:g}"


def _short(value: Any, most: int = 60) -> str:
    text = str(value)
    return text if len(text) <= most else f"{text[: most - 3]}..."
