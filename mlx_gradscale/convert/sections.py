"""Find the model, its optimizers and the scaler in a checkpoint of any shape."""

import hashlib
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from .. import formats
from ..torch_checkpoint import Placeholder
from .optimizer_section import is_flat, is_nested
from .tree import ConvertError, Path, find_key, get, is_tensor, list_some, show, walk

_DEEPEST, _MOST_SECTIONS = 4, 200
# Among several state dicts (a model and its average, say), one at such a name is the
# model.
_MODEL_NAMES = (
    *("model", "state_dict", "model_state_dict", "model_state", "module", "net"),
    *("network", "weights", "model.safetensors", "pytorch_model.bin", "model.pt"),
    *("model.ckpt", "adapter_model.safetensors", "adapter_model.bin"),
)
_AVERAGE = re.compile(
    r"(^|[_./-])(ema|swa|avg|averaged?|teacher|shadow)([_./-]|$)", re.IGNORECASE
)
# Lightning's callbacks put an average into state_dict, and the trained model here.
_TRAINED = "current_model_state"
# torch.amp's, Lightning's, timm's, apex's, mmengine's and Accelerate's names.
_SCALER_NAME = re.compile(r"scaler|^amp$|MixedPrecision|native_amp", re.IGNORECASE)
_MOMENTS = {
    *("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "momentum_buffer"),
    *("square_avg", "acc_delta"),
}
_MASTERS = re.compile(r"fp32|float32|master", re.IGNORECASE)


@dataclass
class Sections:
    """Where the parts of a checkpoint are.

    Attributes:
        model (Path, optional): The state dict of the trained model.
        optimizers (list): Its optimizers.
        scaler (Path, optional): The scaler's state.
        others (list): Further state dicts of models.
        notes (list): Sentences for the user.
    """

    model: Path | None = None
    optimizers: list[Path] = field(default_factory=list)
    scaler: Path | None = None
    others: list[Path] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def is_model(value: Any) -> bool:
    """Tell whether it is a dict of named tensors, at least one of them floating.

    Besides tensors it may hold what ``torch.nn.Module.get_extra_state`` gave.
    """
    return _has_weights(value) and all(
        is_tensor(x) or key.endswith("_extra_state") for key, x in value.items()
    )


def _has_weights(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and all(isinstance(key, str) for key in value)
        and any(
            isinstance(x, mx.array) and mx.issubdtype(x.dtype, mx.floating) and x.ndim
            for x in value.values()
        )
    )


def _is_mixed_model(path: Path, value: Any) -> bool:
    """Tell whether a dict holds a model's tensors beside other values.

    At the top that is torchtitan's layout, deeper it takes a model's name.
    """
    if not _has_weights(value):
        return False
    if path:
        return path[-1] in _MODEL_NAMES
    return any("." in key or key in ("weight", "bias") for key in value)


def is_optimizer(value: Any) -> bool:
    """Tell whether this is the state dict of a ``torch.optim`` optimizer."""
    return is_nested(value) or is_flat(value)


def is_scaler(path: Path, value: Any) -> bool:
    """Tell whether a dict is a scaler's state.

    PyTorch's five keys are enough. Other frameworks' keys are common words, so their
    tables are consulted only for what is named as a scaler.
    """
    if not isinstance(value, dict) or not value:
        return False
    if formats.is_torch_state(value):
        return True
    is_named = any(isinstance(k, str) and _SCALER_NAME.search(k[:80]) for k in path)
    return is_named and formats.recognise_or_none(value) is not None


def find_sections(
    checkpoint: Any, keys: Mapping[str, str | None] | None = None
) -> Sections:
    """Find the sections of a checkpoint by their contents, or by the user's keys.

    Example:
        >>> find_sections({"net": {"weight": mx.zeros((2, 2))}, "epoch": 3}).model
        ('net',)
    """
    given = {name: key for name, key in (keys or {}).items() if key is not None}
    models, optimizers, scalers, mixed = _candidates(checkpoint)
    found = Sections()
    found.model = _choose_model(checkpoint, models, mixed, given.get("model"))
    found.others = [path for path in models if path != found.model]
    if "optimizer" in given:
        names = filter(None, given["optimizer"].split(","))
        found.optimizers = [_named(checkpoint, "optimizer", name) for name in names]
    else:
        found.optimizers = optimizers
        if len(optimizers) > 1 and len(_trained(models)) > 1:
            raise ConvertError(
                f"The checkpoint holds {len(optimizers)} optimizers, "
                f"{list_some(map(show, optimizers))}, and several models: say which "
                "belongs to the model with --optimizer-key."
            )
    if "scaler" in given:
        if given["scaler"]:
            found.scaler = _named(checkpoint, "scaler", given["scaler"])
    elif scalers:
        found.scaler = scalers[0]
        if len(scalers) > 1:
            raise ConvertError(
                f"The checkpoint holds {len(scalers)} scalers, "
                f"{list_some(map(show, scalers))}: choose one with --scaler-key."
            )
    _refuse_lost(checkpoint, found, given)
    found.notes = _notes(checkpoint, found)
    return found


def _candidates(
    checkpoint: Any,
) -> tuple[list[Path], list[Path], list[Path], list[Path]]:
    models: list[Path] = []
    optimizers: list[Path] = []
    scalers: list[Path] = []
    mixed: list[Path] = []
    inside: set[Path] = set()  # contents of a section are no sections themselves
    for path, value in walk(checkpoint, _DEEPEST):
        if _is_within(path, inside):
            continue
        if len(models) + len(optimizers) + len(scalers) + len(mixed) > _MOST_SECTIONS:
            raise ConvertError(
                f"The checkpoint holds more than {_MOST_SECTIONS} models, optimizers "
                "and scalers: save the ones to convert in a file of their own."
            )
        if is_optimizer(value):
            optimizers.append(path)
            # Beside these there may be a scaler (mmengine's).
            flat = is_flat(value)
            inside |= {path} if flat else {(*path, "state"), (*path, "param_groups")}
        elif is_scaler(path, value):
            scalers.append(path)
            inside.add(path)
        elif is_model(value):
            models.append(path)
            inside.add(path)
        elif _is_mixed_model(path, value):
            mixed.append(path)
    # An optimizer's own dict holds no model (DeepSpeed's float32 groups).
    models = [m for m in models if not any(m[: len(o)] == o for o in optimizers)]
    return models, optimizers, scalers, mixed


def _trained(models: Iterable[Path]) -> list[Path]:
    models = list(models)
    fits = [p for p in models if p and p[-1] == _TRAINED]
    return fits or [p for p in models if not _AVERAGE.search(show(p)[-200:])] or models


def _choose_model(
    checkpoint: Any, models: list[Path], mixed: list[Path], key: str | None
) -> Path | None:
    if key is not None:
        return _named(checkpoint, "model", key) if key else None
    if not models:
        return mixed[0] if mixed else None
    fits = _trained(models)
    preferred = [p for p in fits if p and p[-1] in _MODEL_NAMES]
    # Files of their own are models of their own.
    are_files = any(len(p) == 1 and "." in str(p[0]) for p in fits)
    if len(preferred) == 1 and not are_files:
        fits = preferred
    if len(fits) != 1:
        raise ConvertError(
            f"The checkpoint holds {len(models)} models, {list_some(map(show, models))}"
            ": choose one with --model-key, and its optimizer with --optimizer-key. "
            "Convert the others in calls of their own; on the way back, the second "
            "call takes the first one's output as its template (--like)."
        )
    return fits[0]


def _named(checkpoint: Any, section: str, key: str) -> Path:
    path = find_key(checkpoint, key)
    value = get(checkpoint, path)
    fits = {
        "model": _has_weights(value),
        "optimizer": is_optimizer(value),
        "scaler": isinstance(value, dict) and bool(value),
    }
    if not fits[section]:
        what = _whole_module(value)
        raise ConvertError(
            f"--{section}-key {key}: {what or f'there is no state dict of a {section}'}"
            "."
        )
    return path


def _whole_module(value: Any) -> str | None:
    state = value.state if isinstance(value, Placeholder) else None
    if isinstance(state, dict) and {"_parameters", "_modules"} <= state.keys():
        return (
            f"this is a whole module ({value.path}), which only PyTorch can read; save "
            "its state_dict() in its place"
        )
    return None


def _refuse_lost(
    checkpoint: Any, found: Sections, given: Mapping[str, str | None]
) -> None:
    """Raise where a user would lose the model or the optimizer without noticing."""
    if found.model is None and given.get("model") != "":
        for path, value in walk(checkpoint, 2):
            what = _whole_module(value)
            if what:
                raise ConvertError(f"{show(path) or 'The file'}: {what}.")
        if found.scaler is None or found.optimizers:
            has = "an optimizer but no model" if found.optimizers else "no model"
            raise ConvertError(
                f"The checkpoint holds {has} that could be recognised; at its top it "
                f"has {list_some(checkpoint) if isinstance(checkpoint, dict) else 'no'}"
                " keys. Name the model with --model-key. If it is in another file, "
                "copy that into one folder with the optimizer's, as model.safetensors "
                "and optimizer.pt, and give the folder."
            )
    if not found.optimizers and "optimizer" not in given:
        places = _loose_moments(checkpoint, found)
        if places:
            raise ConvertError(
                f"{places[0]} looks like an optimizer's state, but not like a "
                "state_dict() (state and param_groups). Save optimizer.state_dict(), "
                "or leave it out with --optimizer-key ''; it then goes back unchanged."
            )


def _loose_moments(checkpoint: Any, found: Sections) -> list[str]:
    """Return the places of optimizer states that are in no section."""
    sections = {*found.optimizers, *([found.model] if found.model else [])}
    places: list[str] = []
    for path, value in walk(checkpoint):
        if not isinstance(value, dict) or _is_within(path, sections):
            continue
        words = {str(key)[-80:].rpartition(".")[2] for key in value}
        if is_optimizer(value) or words & _MOMENTS:
            places.append(show(path))
            sections.add(path)
    return places


def _is_within(path: Path, sections: set[Path]) -> bool:
    return any(path[:i] in sections for i in range(len(path) + 1))


def _notes(checkpoint: Any, found: Sections) -> list[str]:
    notes = []
    if found.others and found.model is not None:
        notes.append(
            f"{show(found.model)} is taken for the trained model. Also a model, and "
            f"left unchanged: {list_some(map(show, found.others))} (--model-key "
            "chooses another)."
        )
    loose = _loose_moments(checkpoint, found)
    if loose:
        notes.append(
            f"{list_some(loose)}: an optimizer's state that is not converted. It goes "
            "back unchanged beside newer weights, so make a new optimizer in PyTorch."
        )
    return notes + _master_notes(checkpoint, found)


def _master_notes(checkpoint: Any, found: Sections) -> list[str]:
    """Return a note on float32 copies of a model that is in half precision."""
    if found.model is None:
        return []
    weights = [x for x in get(checkpoint, found.model).values() if is_tensor(x)]
    half = sum(
        math.prod(x.shape) for x in weights if _dtype(x) in ("float16", "bfloat16")
    )
    used = {(*path, "state") for path in found.optimizers} | set(found.others)
    sizes: dict[Path, int] = {}
    for path, value in walk(checkpoint) if half else ():
        if not is_tensor(value) or path[:-1] == found.model or _is_within(path, used):
            continue
        if _dtype(value) == "float32":
            named = [i for i, key in enumerate(path) if _MASTERS.search(str(key)[:80])]
            place = path[: named[0] + 1] if named else path[:-1]
            sizes[place] = sizes.get(place, 0) + math.prod(value.shape)
    places = [show(path) for path, size in sizes.items() if size >= half]
    if not places:
        return []
    return [
        f"The model's weights are in half precision, and {list_some(places)} holds "
        "float32 tensors of their size, which look like master weights. They are not "
        "read, and go back unchanged: a program that loads them over the weights would "
        "undo the steps made in MLX. Save the model in float32 to convert it."
    ]


def _dtype(value: Any) -> str:
    return str(value.dtype).rpartition(".")[2]


def entries_beside(checkpoint: Any, sections: Iterable[Path]) -> dict[Path, Any]:
    """Return what of a checkpoint is in no section, by its path.

    Example:
        >>> entries_beside({"net": {"w": 1}, "epoch": 3, "amp": [7]}, [("net",)])
        {('epoch',): 3, ('amp',): [7]}
    """
    taken = set(sections)
    above = {path[:i] for path in taken for i in range(len(path))}
    found: dict[Path, Any] = {}
    left: list[tuple[Path, Any]] = [((), checkpoint)]
    while left:
        path, value = left.pop()
        if path in taken:
            continue
        if path not in above:
            if path:
                found[path] = value
            continue
        inner = value.items() if isinstance(value, dict) else enumerate(value)
        left += reversed([((*path, key), item) for key, item in inner])
    return found


def fingerprint(value: Any) -> str:
    """Return a text that changes with any number or text in a value."""
    digest = hashlib.sha256()
    left, seen = [value], set()
    while left:
        item = left.pop()
        if isinstance(item, (Placeholder, dict, list, tuple)):
            if id(item) in seen:  # shared, or an object that holds itself
                continue
            seen.add(id(item))
        if isinstance(item, Placeholder):
            left += [item.path, item.args, item.state]
        elif isinstance(item, dict):
            left += [x for pair in item.items() for x in pair]
        elif isinstance(item, (list, tuple)):
            left += item
        elif is_tensor(item):
            digest.update(f"{_dtype(item)}{tuple(item.shape)};".encode())
            if isinstance(item, mx.array) and item.size <= 4096:
                digest.update(str(item.tolist()).encode())
        elif isinstance(item, (bool, int, float, str, bytes, type(None))):
            text = item if isinstance(item, (str, bytes)) else f"{item!r:.400}"
            digest.update(
                text if isinstance(text, bytes) else text.encode("utf-8", "replace")
            )
            digest.update(b";")
    return digest.hexdigest()[:16]
