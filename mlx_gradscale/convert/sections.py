"""Find a checkpoint's model, optimizers and scaler up to four levels deep."""

import re
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..core.scale import TORCH_KEYS
from ..core.trees import CONTAINERS, get_at
from ..files.text import list_some
from ..torch_checkpoint import Tensor
from .files import ConvertError, items

Keys = tuple[Any, ...]
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
# The keys of an optimizer's state dict.
_STATE = ("state", "param_groups")
# Models, optimizers and scalers below this depth are not found.
_DEEPEST = 4
_PICKLED = (
    "Only PyTorch can read a pickled module. If it is one, save its state_dict()."
)


def is_flat(value: Any) -> bool:
    """Return whether a value is a state dict that torch.distributed has flattened."""
    return isinstance(value, dict) and any(
        str(key).startswith("param_groups.") for key in value
    )


def _kind(path: Keys, value: dict[Any, Any]) -> str:
    """Return what a dict looks like, or ``""``."""
    if isinstance(value.get("param_groups"), list) or is_flat(value):
        return "optimizer"
    if value.keys() >= TORCH_KEYS.keys():
        return "scaler"
    if any(str(key).rpartition(".")[2] in _MOMENTS for key in value):
        return "moments"
    tensors = {key: x for key, x in value.items() if isinstance(x, Tensor)}
    has_weights = any("float" in x.dtype and x.shape for x in tensors.values())
    if not has_weights or not all(isinstance(key, str) for key in value):
        return ""
    # torch.nn.Module.get_extra_state() may return anything.
    if all(key.endswith("_extra_state") for key in value.keys() - tensors.keys()):
        return "model"
    # torchtitan mixes tensors with other values at the top level. A deeper dict of this
    # kind counts only if it has a model's name.
    is_model = any("." in key or key in ("weight", "bias") for key in value)
    return "mixed" if (path[-1] in _MODEL_NAMES if path else is_model) else "weights"


def find_sections(tree: Any, keys: Mapping[str, str]) -> dict[str, list[Keys]]:
    """Find the model, optimizers and scaler by content, or by the user's keys.

    Return the paths of each: of one model, of any optimizers and of one scaler at most.
    """
    found, places = _search(tree)
    places["model"] |= places["mixed"] | places["weights"]
    chosen: dict[str, list[Keys]] = {}
    for name, text in keys.items():
        wanted = [key for key in text.split(",") if key]
        if not places[name].keys() >= {*wanted}:
            raise ConvertError(
                f"There is no state dict of the {name} at keys={{{name!r}: {text!r}}} "
                f"(--{name}-key). Found: {list_some(places[name]) or 'none'}. "
                f"{_PICKLED}"
            )
        chosen[name] = [places[name][key] for key in wanted]
    models = _trained(found["model"]) or found["mixed"][:1]
    is_ambiguous = len(models) > 1 and "optimizer" not in keys
    named = [path for path in models if path and path[-1] in _MODEL_NAMES]
    found["model"] = named if len(named) == 1 else models
    found |= chosen
    if not found["model"]:
        raise ConvertError(
            "No model was found in the checkpoint. Its keys: "
            f"{list_some(key for key, _ in items(tree)) or 'none'}. Pass the model's "
            "key with keys={'model': ...} (--model-key). If the model is in another "
            "file, copy both files into one folder, as model.safetensors (or model.pt) "
            f"and optimizer.pt, and pass the folder. {_PICKLED} If the file is a "
            "scaler's state dict, use GradScaler.load()."
        )
    for name in SECTIONS:
        # Several optimizers of one model are converted together.
        if len(found[name]) > 1 and (name != "optimizer" or is_ambiguous):
            raise ConvertError(
                f"The checkpoint contains {len(found[name])} {name}s: "
                f"{list_some(map(show, found[name]))}. Choose one with "
                f"keys={{'{name}': ...}} (--{name}-key). To convert several models, "
                "convert them one by one; on the way back, pass each output as --like "
                "for the next."
            )
    if found["moments"] and not found["optimizer"] and "optimizer" not in keys:
        raise ConvertError(
            f"{show(found['moments'][0])} looks like an optimizer state, but is not "
            "a state_dict() with state and param_groups. Save optimizer.state_dict() "
            "in PyTorch, or pass keys={'optimizer': ''} (--optimizer-key '') to keep "
            "the entry unchanged without converting it."
        )
    return {name: found[name] for name in SECTIONS}


def _search(tree: Any) -> tuple[dict[str, list[Keys]], dict[str, dict[str, Keys]]]:
    """Return the paths of all dicts and lists by kind, the least deep ones first.

    The first result has one path of each object, and the second one has all paths, as
    users write them.
    """
    found: dict[str, list[Keys]] = defaultdict(list)
    places: dict[str, dict[str, Keys]] = defaultdict(dict)
    kinds: dict[int, str] = {}  # by object
    left: list[tuple[Keys, Any]] = [((), tree)]
    for path, value in left:
        is_new = id(value) not in kinds
        if is_new:
            is_dict = isinstance(value, dict)
            kinds[id(value)] = _kind(path, value) if is_dict else ""
        kind = kinds[id(value)]
        places[kind][show(path)] = path
        if is_new:
            found[kind].append(path)
            # mmengine stores the scaler in the optimizer's state dict.
            skipped = _STATE if kind == "optimizer" else ()
            if len(path) < _DEEPEST and kind not in ("model", "scaler", "moments"):
                left += [
                    ((*path, key), x)
                    for key, x in items(value)
                    if isinstance(x, CONTAINERS) and key not in skipped
                ]
    return found, places


def _trained(models: list[Keys]) -> list[Keys]:
    """Return the models that are not averages of another."""
    fits = [p for p in models if p and p[-1] == _TRAINED]
    return fits or [p for p in models if not _AVERAGE.search(show(p))] or models


def list_others(tree: Any, sections: Mapping[str, list[Keys]]) -> list[str]:
    """Return the paths of the entries beside the model, optimizers and scaler.

    Of the files that are copied, only random states and data positions matter.
    """
    (model,), optimizers, scalers = (sections[name] for name in SECTIONS)
    paths = [model, *optimizers, *scalers]
    used = {id(get_at(path, tree)) for path in paths}
    outer = dict.fromkeys(path[:i] for path in paths for i in range(len(path)))
    outer |= dict.fromkeys(x for x in optimizers if not is_flat(get_at(x, tree)))
    outer |= {} if model else {(): None}  # weights beside other entries
    own = {*outer, *((*path, key) for path in optimizers for key in _STATE)}
    return [
        show((*path, key))
        for path in outer
        for key, x in items(get_at(path, tree))
        if (*path, key) not in own
        and id(x) not in used
        and not (path == model and isinstance(x, Tensor))
        and not (isinstance(x, Path) and x.suffix not in (".pkl", ".pth"))
    ]


def show(path: Keys) -> str:
    """Return a path as users write it: ``optimizer_states/0``."""
    return "/".join(str(key)[:80] for key in path)
