"""Find a checkpoint's model, optimizers and scaler up to four levels deep."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..core.scale import TORCH_KEYS
from ..files.text import dtype_name, list_some
from .groups import is_flat, is_nested
from .old_checkpoint import Placeholder
from .tree import ConvertError, Path, find_key, get, is_tensor, show, walk

SECTIONS = ("model", "optimizer", "scaler")
# If there are several state dicts, such as a model and its average, the one with one of
# these names is the model.
_MODEL_NAMES = (
    *("model", "state_dict", "model_state_dict", "model_state", "module", "net"),
    *("network", "weights"),
)
_AVERAGE = re.compile(
    r"(^|[_./-])(ema|swa|avg|averaged?|teacher|shadow)([_./-]|$)", re.IGNORECASE
)
# Lightning's callbacks store an average in state_dict and the trained model here.
_TRAINED = "current_model_state"
_MOMENTS = {
    *("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "momentum_buffer"),
    *("square_avg", "acc_delta"),
}
_MASTERS = re.compile(r"fp32|float32|master", re.IGNORECASE)
# Models, optimizers and scalers below this depth are not found.
_DEEPEST = 4


@dataclass
class Sections:
    """Paths of a checkpoint's model, optimizers and scaler, and notes on the rest."""

    model: Path
    optimizers: list[Path]
    scaler: Path | None
    notes: list[str]


def find_sections(checkpoint: Any, keys: Mapping[str, str]) -> Sections:
    """Find the model, optimizers and scaler by content, or by the user's keys."""
    there = _candidates(checkpoint)
    given: dict[str, list[Path]] = {}
    for name, text in keys.items():
        if name not in SECTIONS:
            raise ConvertError(
                f"keys= contains {name!r}, which is not a section. The sections are "
                f"{list_some(SECTIONS)}."
            )
        parts = text.split(",") if name == "optimizer" else [text]
        parts = parts if name == "model" else [*filter(None, parts)]
        given[name] = [_named(checkpoint, name, key) for key in parts]
    (model,) = given.get("model") or [_choose_model(checkpoint, there)]
    optimizers = given.get("optimizer", there["optimizer"])
    if "optimizer" not in given and len(_trained(there["model"])) > 1:
        _check_single("optimizer", optimizers)
    scalers = given.get("scaler", there["scaler"])
    _check_single("scaler", scalers)
    used = {id(get(checkpoint, path)) for path in (*optimizers, model)}
    loose = there["optimizer"] + there["moments"]
    loose = [path for path in loose if id(get(checkpoint, path)) not in used]
    if loose and not optimizers and "optimizer" not in given:
        raise ConvertError(
            f"{show(loose[0]) or 'The file'} looks like an optimizer state, but is not "
            "a state_dict() with state and param_groups. Save optimizer.state_dict() "
            "in PyTorch, or pass keys={'optimizer': ''} (--optimizer-key '') to keep "
            "the entry unchanged without converting it."
        )
    others = [path for path in there["model"] if path != model] + loose
    shown = [*map(show, others), *_masters(checkpoint, model)]
    notes = [
        f"The weights or optimizer states in {list_some(shown)} are not converted. "
        "They are written back to PyTorch unchanged, so they will not match the "
        "weights trained in MLX. To convert another model, pass keys={'model': ...} "
        "(--model-key)."
    ]
    scaler = scalers[0] if scalers else None
    return Sections(model, optimizers, scaler, notes if shown else [])


def _candidates(checkpoint: Any) -> dict[str, list[Path]]:
    """Return the paths of all dicts that look like sections, by kind of section."""
    kinds = (*SECTIONS, "moments", "mixed")
    found: dict[str, list[Path]] = {kind: [] for kind in kinds}
    seen: set[int] = set()
    for path, value in walk(checkpoint, seen=seen):
        kind = _kind_of(path, value) if isinstance(value, dict) else None
        if kind is None or (len(path) > _DEEPEST and kind != "moments"):
            continue
        found[kind].append(path)
        if kind == "optimizer":  # mmengine stores the scaler in it
            found["scaler"] += [(*path, k) for k, x in value.items() if _is_scaler(x)]
        if kind != "mixed":  # the contents of a section are not sections themselves
            seen.update(map(id, value.values()))
    return found


def _kind_of(path: Path, value: dict[Any, Any]) -> str | None:
    if is_nested(value) or is_flat(value):
        return "optimizer"
    if _is_scaler(value):
        return "scaler"
    if any(str(key)[-80:].rpartition(".")[2] in _MOMENTS for key in value):
        return "moments"
    if not _has_weights(value):
        return None
    # torch.nn.Module.get_extra_state() may return anything.
    if all(is_tensor(x) or k.endswith("_extra_state") for k, x in value.items()):
        return "model"
    # torchtitan mixes tensors with other values at the top level. A deeper dict of this
    # kind counts only if it has a model's name.
    is_model = any("." in key or key in ("weight", "bias") for key in value)
    return "mixed" if (path[-1] in _MODEL_NAMES if path else is_model) else None


def _is_scaler(value: Any) -> bool:
    return isinstance(value, dict) and value.keys() >= TORCH_KEYS.keys()


def _has_weights(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and all(isinstance(key, str) for key in value)
        and any(
            is_tensor(x) and "float" in dtype_name(x) and x.shape
            for x in value.values()
        )
    )


def _trained(models: list[Path]) -> list[Path]:
    fits = [p for p in models if p and p[-1] == _TRAINED]
    return fits or [p for p in models if not _AVERAGE.search(show(p)[-200:])] or models


def _check_single(section: str, paths: list[Path]) -> None:
    if len(paths) > 1:
        raise ConvertError(
            f"The checkpoint contains {len(paths)} {section}s: "
            f"{list_some(map(show, paths))}. Choose one with keys={{'{section}': ...}} "
            f"(--{section}-key). To convert several models, convert them one by one; "
            "on the way back, use each output as the template (--like) for the next."
        )


def _choose_model(checkpoint: Any, there: Mapping[str, list[Path]]) -> Path:
    fits = _trained(there["model"]) or there["mixed"][:1]
    preferred = [p for p in fits if p and p[-1] in _MODEL_NAMES]
    fits = preferred if len(preferred) == 1 else fits
    _check_single("model", fits)
    if fits:
        return fits[0]
    for path, value in walk(checkpoint, 2):
        what = _whole_module(value)
        if what:
            raise ConvertError(f"{show(path) or 'The file'} {what}")
    names = list_some(checkpoint) if isinstance(checkpoint, dict) else ""
    raise ConvertError(
        f"No model was found in the checkpoint. Its keys: {names or 'none'}. Pass the "
        "model's key with keys={'model': ...} (--model-key). If the model is in "
        "another file, copy both files into one folder, as model.safetensors (or "
        "model.pt) and optimizer.pt, and pass the folder. If the file is a "
        "scaler's state dict, use GradScaler.load()."
    )


def _named(checkpoint: Any, section: str, key: str) -> Path:
    path = find_key(checkpoint, key)
    value = get(checkpoint, path)
    fits = {
        "model": _has_weights(value),
        "optimizer": is_nested(value) or is_flat(value),
        "scaler": _is_scaler(value),
    }
    if not fits[section]:
        what = f"is not the {section}'s state dict. To list the contents of the file, "
        what = _whole_module(value) or f"{what}run mlx_gradscale inspect."
        raise ConvertError(
            f"The value at keys={{{section!r}: {key!r}}} (--{section}-key) {what}"
        )
    return path


def _whole_module(value: Any) -> str | None:
    state = value.state if isinstance(value, Placeholder) else None
    if isinstance(state, dict) and {"_parameters", "_modules"} <= state.keys():
        return (
            f"is a pickled module ({value.path}), which only PyTorch can read. Save "
            "its state_dict() instead."
        )
    return None


def _masters(checkpoint: Any, model: Path) -> dict[str, None]:
    """Return paths named like float32 copies of weights, for a half-precision model."""
    found: dict[str, None] = {}
    dtypes = [dtype_name(x) for x in get(checkpoint, model).values() if is_tensor(x)]
    is_half = "float16" in dtypes or "bfloat16" in dtypes
    for path, value in walk(checkpoint) if is_half else ():
        if path[:-1] != model and is_tensor(value) and dtype_name(value) == "float32":
            named = [i for i, key in enumerate(path) if _MASTERS.search(str(key)[:80])]
            found |= {show(path[: i + 1]): None for i in named[:1]}
    return found
