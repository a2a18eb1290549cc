"""Find a checkpoint's model, optimizers and scaler up to four levels deep."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ..core.scale import TORCH_KEYS
from ..core.trees import CONTAINERS, get_at
from ..files.text import list_some
from ..torch_checkpoint import Placeholder, Tensor
from .files import ConvertError, items

Path = tuple[Any, ...]
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
# Models, optimizers and scalers below this depth are not found.
_DEEPEST = 4


@dataclass
class Sections:
    """Paths of a checkpoint's model, optimizers and scaler."""

    model: Path
    optimizers: list[Path]
    scaler: Path | None


def is_flat(value: Any) -> bool:
    """Return whether a value is a state dict that torch.distributed has flattened."""
    return isinstance(value, dict) and any(
        str(key).startswith("param_groups.") for key in value
    )


def _has_weights(value: dict[Any, Any]) -> bool:
    tensors = [x for x in value.values() if isinstance(x, Tensor)]
    is_named = all(isinstance(key, str) for key in value)
    return is_named and any("float" in x.dtype and x.shape for x in tensors)


def _kind(path: Path, value: dict[Any, Any]) -> str:
    """Return what a dict looks like, or ``""``."""
    if isinstance(value.get("param_groups"), list) or is_flat(value):
        return "optimizer"
    if value.keys() >= TORCH_KEYS.keys():
        return "scaler"
    if any(str(key).rpartition(".")[2] in _MOMENTS for key in value):
        return "moments"
    if not _has_weights(value):
        return ""
    # torch.nn.Module.get_extra_state() may return anything.
    others = [key for key, x in value.items() if not isinstance(x, Tensor)]
    if all(key.endswith("_extra_state") for key in others):
        return "model"
    # torchtitan mixes tensors with other values at the top level. A deeper dict of this
    # kind counts only if it has a model's name.
    is_model = any("." in key or key in ("weight", "bias") for key in value)
    return "mixed" if (path[-1] in _MODEL_NAMES if path else is_model) else ""


def find_sections(tree: Any, keys: Mapping[str, str]) -> Sections:
    """Find the model, optimizers and scaler by content, or by the user's keys."""
    found = _search(tree)
    found["model"] = _trained(found["model"]) or found["mixed"][:1]
    is_ambiguous = len(found["model"]) > 1 and "optimizer" not in keys
    named = [path for path in found["model"] if path and path[-1] in _MODEL_NAMES]
    if len(named) == 1:
        found["model"] = named
    for name, text in keys.items():
        found[name] = [_find_key(tree, name, key) for key in text.split(",") if key]
    if not found["model"]:
        raise ConvertError(_explain_missing_model(tree))
    for name in SECTIONS:
        # Several optimizers of one model are converted together.
        if len(found[name]) > 1 and (name != "optimizer" or is_ambiguous):
            places = list_some(map(show, found[name]))
            raise ConvertError(
                f"The checkpoint contains {len(found[name])} {name}s: {places}. Choose "
                f"one with keys={{'{name}': ...}} (--{name}-key). To convert several "
                "models, convert them one by one; on the way back, pass each output as "
                "--like for the next."
            )
    if found["moments"] and not found["optimizer"] and "optimizer" not in keys:
        raise ConvertError(
            f"{show(found['moments'][0])} looks like an optimizer state, but is not "
            "a state_dict() with state and param_groups. Save optimizer.state_dict() "
            "in PyTorch, or pass keys={'optimizer': ''} (--optimizer-key '') to keep "
            "the entry unchanged without converting it."
        )
    scaler = next(iter(found["scaler"]), None)
    return Sections(found["model"][0], found["optimizer"], scaler)


def _search(tree: Any) -> dict[str, list[Path]]:
    """Return the paths of all dicts of each kind, the least deep ones first."""
    kinds = "optimizer", "scaler", "moments", "model", "mixed", ""
    found: dict[str, list[Path]] = {kind: [] for kind in kinds}
    left: list[tuple[Path, Any]] = [((), tree)]
    seen: set[int] = set()
    for path, value in left:
        if id(value) in seen:
            continue
        seen.add(id(value))
        kind = _kind(path, value) if isinstance(value, dict) else ""
        found[kind].append(path)
        if len(path) < _DEEPEST and kind in ("", "mixed", "optimizer"):
            # mmengine stores the scaler in the optimizer's state dict.
            skipped = ("state", "param_groups") if kind == "optimizer" else ()
            left += [
                ((*path, key), x)
                for key, x in items(value)
                if isinstance(x, CONTAINERS) and key not in skipped
            ]
    return found


def _trained(models: list[Path]) -> list[Path]:
    """Return the models that are not averages of another."""
    fits = [p for p in models if p and p[-1] == _TRAINED]
    return fits or [p for p in models if not _AVERAGE.search(show(p))] or models


def _find_key(tree: Any, section: str, key: str) -> Path:
    """Return the path that a user wrote as ``KEY/KEY``, or raise."""
    path: Path = ()
    for word in key.split("/"):
        names = {str(name): name for name, _ in items(tree)}
        if word not in names:
            raise ConvertError(
                f"{show(path) or 'The checkpoint'} has no key {word!r}. Its keys are "
                f"{list_some(names) or 'none'}."
            )
        tree, path = tree[names[word]], (*path, names[word])
    is_dict = isinstance(tree, dict)
    if not is_dict or section not in (
        _kind(path, tree),
        _has_weights(tree) and "model",
    ):
        hint = _whole_module(tree) or (
            f"is not the {section}'s state dict. To list the contents of the file, "
            "run mlx_gradscale inspect."
        )
        raise ConvertError(
            f"The value at keys={{{section!r}: {key!r}}} (--{section}-key) {hint}"
        )
    return path


def _whole_module(value: Any) -> str:
    state = value.state if isinstance(value, Placeholder) else None
    if isinstance(state, dict) and {"_parameters", "_modules"} <= state.keys():
        return (
            f"is a pickled module ({value.path}), which only PyTorch can read. Save "
            "its state_dict() instead."
        )
    return ""


def _explain_missing_model(tree: Any) -> str:
    entries = dict(items(tree))
    for name, value in [("The file", tree), *entries.items()]:
        hint = _whole_module(value)
        if hint:
            return f"{name} {hint}"
    keys = list_some(entries) or "none"
    return (
        f"No model was found in the checkpoint. Its keys: {keys}. Pass the model's key "
        "with keys={'model': ...} (--model-key). If the model is in another file, copy "
        "both files into one folder, as model.safetensors (or model.pt) and "
        "optimizer.pt, and pass the folder. If the file is a scaler's state dict, use "
        "GradScaler.load()."
    )


def show(path: Path) -> str:
    """Return a path as users write it: ``optimizer_states/0``."""
    return "/".join(str(key)[:80] for key in path)


def list_others(tree: Any, sections: Sections) -> Iterator[str]:
    """Yield the paths of the entries beside the model, optimizers and scaler."""
    paths = [sections.model, *sections.optimizers]
    paths += [] if sections.scaler is None else [sections.scaler]
    used = {id(get_at(tree, path)) for path in paths}
    outer = {path[:i]: None for path in paths for i in range(len(path))}
    outer |= dict.fromkeys(sections.optimizers)
    outer |= {} if sections.model else {(): None}  # tensors mixed with other entries
    for path in outer:
        value = get_at(tree, path)
        is_optimizer = path in sections.optimizers
        own = ("state", "param_groups") if is_optimizer else ()
        for key, x in () if is_flat(value) else items(value):
            is_weight = path == sections.model and isinstance(x, Tensor)
            is_own = id(x) in used or (*path, key) in outer or key in own
            if not is_weight and not is_own:
                yield show((*path, key))
