"""Where the model, the optimizer and the scaler are in a checkpoint of any shape."""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import mlx.core as mx

from .. import formats
from ..torch_checkpoint import Placeholder
from .flat_optimizer import is_flat
from .skeleton import Path, cut, get

_DEEPEST = 4
# Where several dicts of tensors are found (a model and its average, say), the one
# at such a name is the model.
_MODEL_NAMES = (
    "model",
    "state_dict",
    "model_state_dict",
    "model_state",
    "module",
    "net",
    "network",
    "weights",
    "model.safetensors",
    "pytorch_model.bin",
    "model.safetensors.index.json",
    "pytorch_model.bin.index.json",
)
# Averages of a model, which are not what the optimizer trains.
_AVERAGES = re.compile(
    r"(.*[_./-])?(ema|swa|avg|averaged?|teacher|shadow)([_./-].*)?", re.IGNORECASE
)
# Lightning's callbacks put an average into state_dict, and the trained model here.
_TRAINED = "current_model_state"
_MOMENTS = {
    *("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "momentum_buffer"),
    *("square_avg", "acc_delta"),
}


class SectionsError(ValueError):
    """A checkpoint in which the sections cannot be told apart."""


class Unordered(dict[Any, Any]):
    """A state dict from a file that does not keep the model's order (safetensors)."""


def is_model(value: Any) -> bool:
    """Tell whether it is a dict of named tensors, at least one of them floating.

    Besides tensors it may hold what ``torch.nn.Module.get_extra_state`` gave.
    """
    return _has_weights(value) and not _keys_without_tensors(value)


def _has_weights(value: Any) -> bool:
    return (
        isinstance(value, Mapping)
        and all(isinstance(key, str) for key in value)
        and any(
            isinstance(x, mx.array) and mx.issubdtype(x.dtype, mx.floating) and x.ndim
            for x in value.values()
        )
    )


def _keys_without_tensors(value: Mapping[str, Any]) -> list[str]:
    """Return the keys that are neither tensors nor extra states."""
    return [
        key
        for key, x in value.items()
        if not isinstance(x, mx.array) and key.rsplit(".", 1)[-1] != "_extra_state"
    ]


def _may_be_model(value: Any) -> bool:
    """Tell whether a dict holds tensors, and its other values hold none themselves."""
    return _has_weights(value) and not any(
        _holds_arrays(value[k]) for k in _keys_without_tensors(value)
    )


def _holds_arrays(value: Any) -> bool:
    if isinstance(value, Mapping):
        value = value.values()
    elif not isinstance(value, (list, tuple)):
        return isinstance(value, mx.array)
    return any(map(_holds_arrays, value))


def is_optimizer(value: Any) -> bool:
    """Tell whether this is a state dict of a ``torch.optim`` optimizer, flat or not.

    One without a state, of an SGD without momentum, has none in a folder of
    torch.distributed.checkpoint, which keeps no empty dict.
    """
    return is_flat(value) or (
        isinstance(value, Mapping)
        and isinstance(value.get("state", {}), Mapping)
        and isinstance(value.get("param_groups"), list)
        and all(isinstance(g, Mapping) and "params" in g for g in value["param_groups"])
    )


def is_scaler(value: Any) -> bool:
    """Tell whether :mod:`mlx_gradscale.formats` knows a scaler state by its keys."""
    if not isinstance(value, Mapping) or not all(isinstance(k, str) for k in value):
        return False
    try:
        return bool(value) and bool(formats.recognise(value))
    except ValueError:
        return False


def looks_like_optimizer(value: Any) -> bool:
    """Tell whether a dict itself holds an optimizer's moments, in whatever shape."""
    if not isinstance(value, Mapping):
        return False
    words = {str(key).rsplit(".", 1)[-1] for key in value}
    return is_optimizer(value) or bool(words & _MOMENTS)


_TESTS = {"optimizer": is_optimizer, "scaler": is_scaler, "model": is_model}
# Where the user says so, the model may hold other values too.
_NAMED_TESTS = _TESTS | {"model": _may_be_model}


def find_sections(
    checkpoint: Any, keys: Mapping[str, str] | None = None
) -> dict[str, Path]:
    """Find the sections of a checkpoint by what they contain.

    Args:
        checkpoint (Any): A dict of any shape, or a bare state dict.
        keys (dict, optional): Section -> its place, as ``"optimizer_states/0"``, where
            it is known; an empty string leaves the section out.

    Returns:
        dict: Section (``"model"``, ``"optimizer"``, ``"scaler"``) -> its path.

    Raises:
        SectionsError: If several places fit, or a named one does not.

    Example:
        >>> find_sections({"net": {"weight": mx.zeros((2, 2))}, "epoch": 3})
        {'model': ('net',)}
    """
    keys = dict(keys or {})
    found: dict[str, list[Path]] = {section: [] for section in _TESTS}
    mixed: list[Path] = []
    for path, value in _walk(checkpoint):
        if _may_be_model(value):
            mixed.append(path)
        for section, test in _TESTS.items():
            if test(value):
                found[section].append(path)
                break
    # In an optimizer's dict there may be a scaler (mmengine's), and no model.
    inside = found["optimizer"]
    found["model"] = [p for p in found["model"] if not _is_in(p, inside)]
    sections: dict[str, Path] = {}
    if not found["model"]:
        whole = () in mixed and not any(found.values())
        found["model"] = [p for p in mixed if (p[-1] in _MODEL_NAMES if p else whole)]
    for section in ("model", "optimizer", "scaler"):
        if section in keys:
            if keys[section]:
                sections[section] = _named(checkpoint, section, keys[section])
        elif found[section]:
            sections[section] = _one_path(section, found[section])
    mixed = [path for path in mixed if path]  # the outermost dict has no key to name
    if mixed and "model" not in {**sections, **keys} and sections.keys() != {"scaler"}:
        place = _shown(mixed[0])
        key = _keys_without_tensors(get(checkpoint, mixed[0]))[0]
        raise SectionsError(
            f"{place} holds tensors, and {key!r}, which is none: if it is the model, "
            f"say so with --model-key {place}; what is no tensor is then kept for the "
            "way back."
        )
    if "optimizer" not in keys:
        _refuse_moments(cut(checkpoint, sections), sections)
    if not sections:
        modules = [path for path, value in _objects(checkpoint) if _is_module(value)]
        if modules:
            place = "/".join(map(str, modules[0])) or "The file"
            raise SectionsError(
                f"{place} is a whole PyTorch model, which only its own program can "
                "make: save its state_dict() there."
            )
        raise SectionsError(
            "The checkpoint holds no model, optimizer or scaler that could be "
            "recognised: name them with --model-key, --optimizer-key, --scaler-key."
        )
    return sections


def other_models(checkpoint: Any, sections: Mapping[str, Path]) -> list[str]:
    """Return the places of further models, beside the one that was taken.

    Example:
        >>> weights = {"weight": mx.zeros((2, 2))}
        >>> other_models({"net": weights, "ema": weights}, {"model": ("net",)})
        ['ema']
    """
    if "model" not in sections:
        return []
    return [
        _shown(path)
        for path, value in _walk(checkpoint)
        if is_model(value)
        and not any(test(value) for test in (is_optimizer, is_scaler))
        and not _is_in(path, sections.values())
    ]


def moments_in(skeleton: Any) -> list[str]:
    """Return the places of optimizer states that are in no section.

    Example:
        >>> moments_in({"opt": {"w": {"exp_avg": 1}}, "epoch": 3})
        ['opt/w']
    """
    found: list[str] = []
    left: list[tuple[Path, Any]] = [((), skeleton)]
    seen: set[int] = set()
    while left:  # to any depth, without recursion, and what is shared once
        path, value = left.pop()
        if looks_like_optimizer(value):
            found.append(_shown(path))
        elif isinstance(value, (Mapping, list, tuple)) and id(value) not in seen:
            seen.add(id(value))
            inner: Iterable[tuple[Any, Any]] = enumerate(value)
            if isinstance(value, Mapping):
                inner = value.items()
            left += [((*path, key), item) for key, item in inner]
    return sorted(found)


def _refuse_moments(skeleton: Any, sections: Mapping[str, Path]) -> None:
    places = moments_in(skeleton)
    if places:
        beside = ", besides the one that was found" if "optimizer" in sections else ""
        raise SectionsError(
            f"{places[0]} looks like the state of an optimizer{beside}, and is not of "
            "a shape that could be converted (state and param_groups). Save "
            "optimizer.state_dict() itself; or leave it out, and keep it for the way "
            "back as it is, with --optimizer-key ''."
        )


def _is_in(path: Path, places: Iterable[Path]) -> bool:
    return any(path[: len(place)] == place for place in places)


def _walk(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield the dicts of a checkpoint, from the outside; not those inside a section."""
    if isinstance(value, Mapping):
        yield path, value
        inner: Iterable[tuple[Any, Any]] = value.items()
        if is_optimizer(value):
            inner = [
                (k, v) for k, v in value.items() if k not in ("state", "param_groups")
            ]
            inner = [] if is_flat(value) else inner
        elif any(test(value) for test in _TESTS.values()):
            return
    elif isinstance(value, (list, tuple)):
        inner = enumerate(value)
    else:
        return
    if len(path) < _DEEPEST:
        for key, item in inner:
            yield from _walk(item, (*path, key))


def _objects(value: Any) -> Iterator[tuple[Path, Any]]:
    yield (), value
    for path, found in _walk(value):
        yield from (((*path, key), item) for key, item in found.items())


def _is_module(value: Any) -> bool:
    state = value.state if isinstance(value, Placeholder) else None
    return isinstance(state, dict) and {"_parameters", "_modules"} <= state.keys()


def _one_path(section: str, paths: list[Path]) -> Path:
    fits = paths
    if section == "model" and len(fits) > 1:
        fits = [p for p in paths if p and p[-1] == _TRAINED]
        fits = fits or [
            p for p in paths if not _AVERAGES.fullmatch("/".join(map(str, p)))
        ]
        preferred = [p for p in fits if p and p[-1] in _MODEL_NAMES]
        # Files of their own are models of their own.
        if len(preferred) == 1 and not any(
            len(p) == 1 and "." in str(p[0]) for p in fits
        ):
            fits = preferred
    if len(fits) != 1:
        places = ", ".join(_shown(path) for path in paths)
        raise SectionsError(
            f"The checkpoint holds {len(paths)} that could be the {section}: say which "
            f"with --{section}-key, one of {places}; or several, with commas, each "
            "with its own optimizer (--model-key, --optimizer-key)."
        )
    return fits[0]


def _shown(path: Path) -> str:
    return "/".join(map(str, path))


def _named(checkpoint: Any, section: str, key: str) -> Path:
    path: list[str | int] = []
    value = checkpoint
    for word in key.split("/"):
        step: str | int = word
        if isinstance(value, (list, tuple)) and word.isdigit():
            step = int(word)
        try:
            value = value[step]
        except (KeyError, IndexError, TypeError):
            raise SectionsError(
                f"--{section}-key {key}: there is no {step!r} in the checkpoint."
            ) from None
        path.append(step)
    if not _NAMED_TESTS[section](value):
        raise SectionsError(
            f"--{section}-key {key}: what is there is no {section} state."
        )
    return tuple(path)
