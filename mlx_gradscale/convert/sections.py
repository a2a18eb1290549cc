"""Find the model, its optimizers and the scaler in a checkpoint of any structure."""

import hashlib
import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from .. import formats
from ..files.text import dtype_name
from ..torch_checkpoint import Placeholder
from .groups import is_flat, is_nested
from .tree import ConvertError, Path, find_key, get, is_tensor, list_some, show, walk

# Among several state dicts (say, a model and its average), the one with such a name is
# the model.
_MODEL_NAMES = (
    *("model", "state_dict", "model_state_dict", "model_state", "module", "net"),
    *("network", "weights"),
)
_AVERAGE = re.compile(
    r"(^|[_./-])(ema|swa|avg|averaged?|teacher|shadow)([_./-]|$)", re.IGNORECASE
)
# Lightning's callbacks store an average in state_dict and the trained model here.
_TRAINED = "current_model_state"
# Names used by torch.amp, Lightning, timm, apex, mmengine and Accelerate.
_SCALER_NAME = re.compile(r"scaler|^amp$|MixedPrecision|native_amp", re.IGNORECASE)
_MOMENTS = {
    *("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "momentum_buffer"),
    *("square_avg", "acc_delta"),
}
_MASTERS = re.compile(r"fp32|float32|master", re.IGNORECASE)
# Models, optimizers and scalers are at most this deep.
_DEEPEST = 4


@dataclass
class Sections:
    """Paths of a model's state dict, its optimizers and the scaler, and notes."""

    model: Path | None = None
    optimizers: list[Path] = field(default_factory=list)
    scaler: Path | None = None
    notes: list[str] = field(default_factory=list)


def find_sections(
    checkpoint: Any, keys: Mapping[str, str | None] | None = None
) -> Sections:
    """Find the sections of a checkpoint by their contents, or by the user's keys."""
    there = _candidates(checkpoint)
    given: dict[str, list[Path]] = {}
    for name, text in (keys or {}).items():
        if text is not None:
            parts = text.split(",") if name == "optimizer" else [text]
            given[name] = [_named(checkpoint, name, key) for key in parts if key]
    models, scalers = there["model"], given.get("scaler", there["scaler"])
    chosen = given.get("model")
    if chosen is None:
        chosen = _choose_model(models, there["mixed"])
    optimizers = given.get("optimizer", there["optimizer"])
    if len(optimizers) > 1 and "optimizer" not in given and len(_trained(models)) > 1:
        raise ConvertError(
            "The checkpoint contains several models and "
            f"{len(optimizers)} optimizers: {list_some(map(show, optimizers))}. Choose "
            "the model's optimizer with --optimizer-key."
        )
    if len(scalers) > 1:
        raise ConvertError(
            f"The checkpoint contains {len(scalers)} scalers: "
            f"{list_some(map(show, scalers))}. Choose one with --scaler-key."
        )
    found = Sections(chosen[0] if chosen else None, optimizers)
    found.scaler = scalers[0] if scalers else None
    if found.model is None and "model" not in given:
        _refuse_without_model(checkpoint, found)
    used = {_text(path) for path in (*optimizers, found.model) if path is not None}
    unused = [*there["optimizer"], *there["moments"]]
    loose = [path for path in unused if _text(path) not in used]
    if loose and not optimizers and "optimizer" not in given:
        raise ConvertError(
            f"{show(loose[0])} looks like an optimizer state, but is not a "
            "state_dict() with state and param_groups. Save optimizer.state_dict(), or "
            "leave it out with --optimizer-key ''; it is then written back to PyTorch "
            "unchanged."
        )
    others = [path for path in models if path != found.model]
    found.notes = _notes(checkpoint, found, others, loose)
    return found


def _candidates(checkpoint: Any) -> dict[str, list[Path]]:
    """Return the paths of everything that looks like a section, by kind."""
    kinds = ("optimizer", "scaler", "moments", "model", "mixed")
    found: dict[str, list[Path]] = {kind: [] for kind in kinds}
    inside: set[str] = set()  # contents of a section are not sections themselves
    for path, value in walk(checkpoint):
        if not isinstance(value, dict) or _is_within(path, inside):
            continue
        kind = _kind_of(path, value)
        if kind is None or (len(path) > _DEEPEST and kind != "moments"):
            continue
        found[kind].append(path)
        if is_nested(value):  # there may be a scaler next to these (mmengine)
            inside |= {_text((*path, key)) for key in ("state", "param_groups")}
        elif kind != "mixed":
            inside.add(_text(path))
    # An optimizer's dict does not contain a model (DeepSpeed's float32 groups).
    optimizers = set(map(_text, found["optimizer"]))
    found["model"] = [m for m in found["model"] if not _is_within(m, optimizers)]
    return found


def _kind_of(path: Path, value: dict[Any, Any]) -> str | None:
    """Return the kind of a dict, a key of :func:`_candidates`, or None."""
    if is_nested(value) or is_flat(value):
        return "optimizer"
    # PyTorch's five keys are sufficient for a scaler. Other frameworks' keys are common
    # words, so their tables are consulted only for entries named like a scaler.
    is_named = any(isinstance(k, str) and _SCALER_NAME.search(k[:80]) for k in path)
    if value and formats.is_state(value, is_named):
        return "scaler"
    if any(str(key)[-80:].rpartition(".")[2] in _MOMENTS for key in value):
        return "moments"
    if not _has_weights(value):
        return None
    # The results of torch.nn.Module.get_extra_state may be anything.
    if all(is_tensor(x) or k.endswith("_extra_state") for k, x in value.items()):
        return "model"
    # Tensors among other values: at the top level that is torchtitan's layout; deeper,
    # a model's name is required.
    is_model = any("." in key or key in ("weight", "bias") for key in value)
    return "mixed" if (path[-1] in _MODEL_NAMES if path else is_model) else None


def _has_weights(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and all(isinstance(key, str) for key in value)
        and any(
            isinstance(x, mx.array) and mx.issubdtype(x.dtype, mx.floating) and x.ndim
            for x in value.values()
        )
    )


def _trained(models: list[Path]) -> list[Path]:
    fits = [p for p in models if p and p[-1] == _TRAINED]
    return fits or [p for p in models if not _AVERAGE.search(show(p)[-200:])] or models


def _choose_model(models: list[Path], mixed: list[Path]) -> list[Path]:
    if not models:
        return mixed
    fits = _trained(models)
    preferred = [p for p in fits if p and p[-1] in _MODEL_NAMES]
    fits = preferred if len(preferred) == 1 else fits
    if len(fits) != 1:
        raise ConvertError(
            f"The checkpoint contains {len(models)} models: "
            f"{list_some(map(show, models))}. Choose one with --model-key, and its "
            "optimizer with --optimizer-key. To write both back to one PyTorch "
            "checkpoint, pass the output of the first to the second as --like."
        )
    return fits


def _named(checkpoint: Any, section: str, key: str) -> Path:
    path = find_key(checkpoint, key)
    value = get(checkpoint, path)
    fits = {
        "model": _has_weights(value),
        "optimizer": is_nested(value) or is_flat(value),
        "scaler": isinstance(value, dict) and bool(value),
    }
    if not fits[section]:
        article = "an" if section == "optimizer" else "a"
        what = _whole_module(value) or f"is not the state dict of {article} {section}."
        raise ConvertError(f"--{section}-key {key} {what}")
    return path


def _whole_module(value: Any) -> str | None:
    state = value.state if isinstance(value, Placeholder) else None
    if isinstance(state, dict) and {"_parameters", "_modules"} <= state.keys():
        return (
            f"is a pickled module ({value.path}), which only PyTorch can read. Save "
            "its state_dict() instead."
        )
    return None


def _refuse_without_model(checkpoint: Any, found: Sections) -> None:
    for path, value in walk(checkpoint, 2):
        what = _whole_module(value)
        if what:
            raise ConvertError(f"{show(path) or 'The file'} {what}")
    if found.scaler is None or found.optimizers:
        has = "an optimizer but no model" if found.optimizers else "no model"
        keys = list_some(checkpoint) if isinstance(checkpoint, dict) else "none"
        raise ConvertError(
            f"Found {has} in the checkpoint. Its keys are {keys}. Pass the model's key "
            "with --model-key. If the model is in another file, copy both into one "
            "folder, as model.safetensors and optimizer.pt, and pass the folder."
        )


def _text(path: Path) -> str:
    """Return a path as a key of a set: a file can choose keys whose hashes collide."""
    return "".join(f"/{str(key)[:200]}" for key in path)


def _is_within(path: Path, sections: Collection[str]) -> bool:
    return any(_text(path[:i]) in sections for i in range(len(path) + 1))


def _notes(
    checkpoint: Any, found: Sections, others: list[Path], loose: list[Path]
) -> list[str]:
    notes = []
    if others and found.model is not None:
        notes.append(
            f"Converting the model {show(found.model)}. The checkpoint also contains "
            f"{list_some(map(show, others))}, which stays unchanged. Choose another "
            "with --model-key."
        )
    if loose:
        notes.append(
            f"The optimizer state in {list_some(map(show, loose))} is not converted "
            "and is written back unchanged. It will not match the new weights, so "
            "create a new optimizer in PyTorch."
        )
    masters = _masters(checkpoint, found, others)
    if masters:
        notes.append(
            f"The model is in half precision, and {list_some(masters)} contains "
            "float32 tensors of the same size, probably its master weights. They are "
            "written back unchanged, so a program that loads them loses the steps "
            "taken in MLX. Save the model in float32 before converting."
        )
    return notes


def _masters(checkpoint: Any, found: Sections, others: list[Path]) -> list[str]:
    """Return the paths of float32 copies of a half-precision model."""
    held = {} if found.model is None else get(checkpoint, found.model)
    half = sum(
        math.prod(x.shape)
        for x in held.values()
        if is_tensor(x) and dtype_name(x) in ("float16", "bfloat16")
    )
    states = [(*path, "state") for path in found.optimizers]
    used = set(map(_text, [*states, *others]))
    sizes: dict[str, int] = {}
    for path, value in walk(checkpoint) if half else ():
        if not is_tensor(value) or path[:-1] == found.model or _is_within(path, used):
            continue
        if dtype_name(value) == "float32":
            named = [i for i, key in enumerate(path) if _MASTERS.search(str(key)[:80])]
            place = path[: named[0] + 1] if named else path[:-1]
            name = show(place)
            sizes[name] = sizes.get(name, 0) + math.prod(value.shape)
    return [name for name, size in sizes.items() if size >= half]


def entries_beside(checkpoint: Any, sections: Collection[Path]) -> dict[str, Any]:
    """Return the entries next to the sections, by path."""
    above = {_text(path[:i]) for path in sections for i in range(len(path))}
    known = above.union(map(_text, sections))
    deepest = max(map(len, sections), default=0)
    return {
        show(path): value
        for path, value in walk(checkpoint, deepest, leaves=True)
        if path and _text(path[:-1]) in above and _text(path) not in known
    }


def fingerprint(value: Any) -> str:
    """Return a string that changes with any number or string in a value."""
    digest = hashlib.sha256()
    for path, item in walk(value, 100, leaves=True):
        text = ""
        if is_tensor(item):
            text = f"{dtype_name(item)}{tuple(item.shape)}"
            if isinstance(item, mx.array) and item.size <= 4096:
                text += str(item.tolist())
        elif not isinstance(item, (dict, list, tuple)):
            text = f"{item!r:.400}"
        digest.update(f"{show(path)}={text};".encode("utf-8", "replace"))
    return digest.hexdigest()[:16]
