"""Map PyTorch names to the parameters of an MLX model.

Wrappers (DistributedDataParallel, torch.compile, FSDP, Lightning) add words to names,
PEFT has its own names, and mlx-lm models have a ``sanitize`` that converts from
Transformers' names. It is called with marked arrays, so that each output shows which
input it came from.
"""

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from .tree import ConvertError

# Words added by torch.compile, FullyShardedDataParallel, activation checkpointing.
_PRIVATE_WORDS = r"_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module"
# DistributedDataParallel's "module" may also be one of the user's own modules.
_WRAPPERS = re.compile(rf"(^|(?<=\.))(module|{_PRIVATE_WORDS})\.")
_PRIVATE = re.compile(rf"(^|(?<=\.))({_PRIVATE_WORDS})\.")
# The usual attribute of a LightningModule; GPT-2 with a head in Transformers.
_PREFIXES = ("model.", "transformer.")
# base_model.model.<path>.lora_A[.<adapter>].weight
_PEFT = "base_model.model."
_ADAPTER = re.compile(r"(.+)\.lora_([AB])(?:\.\w+)?\.weight")
DROPPED = "dropped"  # in place of a layout: the model's sanitize drops the tensor

_LAYER_LAYOUTS: dict[tuple[type[nn.Module], ...], str] = {
    (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Bilinear): "conv",
    (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d): "conv_transpose",
}


@dataclass(frozen=True)
class Target:
    """Parameters of the model: their names, shapes, and layout."""

    mlx: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    layout: str | None  # None: not one of MLX's own layers


def unwrap(name: str) -> str:
    """Strip the words of all wrappers from a name, wherever they are.

    Example:
        >>> unwrap("module._orig_mod.blocks.0._fsdp_wrapped_module.weight")
        'blocks.0.weight'
    """
    return _WRAPPERS.sub("", name)


def from_peft(name: str) -> tuple[str, str | None]:
    """Return mlx-lm's name and layout for a PEFT tensor; other names are unchanged.

    PEFT stores A as (rank, in) and B as (out, rank), mlx-lm (in, rank) and (rank, out).

    Example:
        >>> from_peft("base_model.model.layers.0.q_proj.lora_A.weight")
        ('layers.0.q_proj.lora_a', 'transpose')
    """
    name = name.removeprefix(_PEFT)
    found = _ADAPTER.fullmatch(name)
    if found is None:
        return name, None
    return f"{found[1]}.lora_{found[2].lower()}", "transpose"


def is_adapter(names: Collection[str]) -> bool:
    """Return whether a state dict holds PEFT adapters without the base model."""
    return any(_ADAPTER.fullmatch(n) for n in names) and all(
        n.startswith(_PEFT) or _ADAPTER.fullmatch(n) for n in names
    )


def new_names(
    shapes: Mapping[str, tuple[int, ...]],
    rename: Callable[[str], str],
    model: nn.Module | None,
    known: Collection[str],
    is_lightning: bool = False,
) -> tuple[dict[str, tuple[str, str | None]], dict[str, tuple[int, ...]] | None]:
    """Find the MLX name of each tensor, and its layout where the name implies it.

    ``known`` holds the names that the model accepts. Without a model, the ``model.``
    prefix is stripped from a Lightning checkpoint if all names have it. The second
    result is the names and shapes passed to the model's ``sanitize``, if it was called.
    """
    if model is None:
        strip = _unwrapper(list(shapes), rename, is_lightning)
        return {name: from_peft(strip(name)) for name in shapes}, None
    best: dict[str, tuple[str, str | None]] = {}
    asked: dict[str, tuple[int, ...]] | None = None
    best_hits = -1
    for candidate in _rename_candidates(rename):
        out = {name: from_peft(candidate(name)) for name in shapes}
        renamed = None
        if hasattr(model, "sanitize") and not is_adapter(shapes):
            plain = [name for name, (_, layout) in out.items() if layout is None]
            renamed = {out[name][0]: shapes[name] for name in plain}
            found = probe_sanitize(model, renamed)
            for name in plain:
                out[name] = found.get(out[name][0], (out[name][0], DROPPED))
        hits = sum(new in known for new, _ in out.values())
        if hits > best_hits:  # the first of equals: strip as little as possible
            best, best_hits, asked = out, hits, renamed
        if hits == len(shapes):
            break
    return best, asked


def _unwrapper(
    names: list[str], rename: Callable[[str], str], is_lightning: bool
) -> Callable[[str], str]:
    """Return a function that strips wrappers, without a model to compare with."""
    prefix = ""
    for word in ("module.", "model." if is_lightning else ""):
        start = prefix + word
        if word and all(_PRIVATE.sub("", rename(n)).startswith(start) for n in names):
            prefix = start
    return lambda name: _PRIVATE.sub("", rename(name)).removeprefix(prefix)


def _rename_candidates(rename: Callable[[str], str]) -> Iterator[Callable[[str], str]]:
    """Yield functions that may map PyTorch's names to the model's, simplest first."""
    yield rename
    for prefix in ("", *_PREFIXES):

        def strip(name: str, prefix: str = prefix) -> str:
            return unwrap(name).removeprefix(prefix)

        yield lambda name, strip=strip: strip(rename(name))  # type: ignore[misc]
        yield lambda name, strip=strip: rename(strip(name))  # type: ignore[misc]


def known_names(model: nn.Module) -> dict[str, Target]:
    """Return the PyTorch names, in either spelling, that a model accepts."""
    modules = dict(model.named_modules())
    known: dict[str, Target] = {}
    for name, array in tree_flatten(model.parameters()):
        words = name.split(".")
        owner = modules.get(".".join(words[:-1]))
        layout = None if array.ndim > 2 else "same"
        for kinds, special in _LAYER_LAYOUTS.items():
            if isinstance(owner, kinds) and words[-1] == "weight":
                layout = special
        target = Target((name,), (array.shape,), layout)
        known[name] = target
        known.setdefault(_torch_spelling(words, modules), target)
    for path, module in modules.items():
        if isinstance(module, nn.MultiHeadAttention):
            known |= _fused_names(path, module, modules)
    return known


def _torch_spelling(words: list[str], modules: Mapping[str, nn.Module]) -> str:
    """Drop the "layers" that MLX's nn.Sequential adds before its indices."""
    return ".".join(
        word
        for i, word in enumerate(words)
        if word != "layers"
        or not isinstance(modules.get(".".join(words[:i])), nn.Sequential)
    )


def _fused_names(
    path: str, module: nn.Module, modules: Mapping[str, nn.Module]
) -> dict[str, Target]:
    """Return the in_proj_weight and in_proj_bias names of PyTorch's attention."""
    prefix = f"{path}." if path else ""
    parts = ("query_proj", "key_proj", "value_proj")
    known = {}
    for leaf in ("weight", "bias"):
        if all(leaf in module[part] for part in parts):
            names = tuple(f"{prefix}{part}.{leaf}" for part in parts)
            shapes = tuple(module[part][leaf].shape for part in parts)
            fused = f"{prefix}in_proj_{leaf}"
            target = Target(names, shapes, "split_qkv")
            known[fused] = target
            known[_torch_spelling(fused.split("."), modules)] = target
    return known


# Marks are spaced far apart, so that a sum or product is not mistaken for a mark.
_APART = 1009
_LAYOUTS_BY_AXES = {
    **{tuple(range(n)): "same" for n in range(6)},
    (1, 0): "transpose",
    **{(0, *range(2, n), 1): "conv" for n in (3, 4, 5)},
    **{(*range(1, n), 0): "conv_transpose" for n in (3, 4, 5)},
}


def probe_sanitize(
    model: nn.Module, shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, tuple[str, str | None]]:
    """Find the new name and the layout of each tensor that ``sanitize`` keeps.

    The model is not changed. Anything beyond renaming and transposing is an error.

    Example:
        >>> class Model(nn.Module):
        ...     def sanitize(self, weights):
        ...         return {f"model.{k}": v.T for k, v in weights.items()}
        >>> probe_sanitize(Model(), {"w": (2, 3)})
        {'w': ('model.w', 'transpose')}
    """
    names = {_APART * (i + 1): name for i, name in enumerate(shapes)}
    # The marks are broadcast, not stored.
    marked = {
        name: mx.broadcast_to(mx.array(mark, mx.float32), shapes[name])
        for mark, name in names.items()
    }
    renamed: dict[str, str] = {}
    with _unchanged(model):
        results = _sanitize(model, marked)
    for new, array in results.items():
        mark = _first(array)
        old = None if mark is None else names.get(mark)
        if old is None or array.size != marked[old].size or old in renamed:
            what = f"{old} becomes {new}" if old else f"{new} is computed"
            raise ConvertError(
                f"The sanitize of {type(model).__name__} does more than rename and "
                f"transpose: {what}. Give names and layouts by hand (--rename, "
                "--transpose), with the model as MODULE:NAME."
            )
        renamed[old] = new
    axes = _trace_axes(model, {name: shapes[name] for name in renamed}, renamed)
    out: dict[str, tuple[str, str | None]] = {}
    for name, new in renamed.items():
        if axes[name] not in _LAYOUTS_BY_AXES:
            raise ConvertError(f"{name} becomes {new} with its axes as {axes[name]}.")
        out[name] = (new, _LAYOUTS_BY_AXES[axes[name]])
    return out


def known_after_sanitize(
    model: nn.Module, shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, Target]:
    """Return the names that a model accepts after it has sanitized these weights.

    Gemma 3's ``sanitize`` removes ``lm_head`` where the checkpoint has none.
    """
    with _unchanged(model):
        apply_sanitize(model, shapes)
        return known_names(model)


def apply_sanitize(model: nn.Module, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Let ``sanitize`` modify the model, as when loading with mlx-lm."""
    zeros = {n: mx.broadcast_to(mx.array(0.0), s) for n, s in shapes.items()}
    _sanitize(model, zeros)


def _trace_axes(
    model: nn.Module, shapes: Mapping[str, tuple[int, ...]], renamed: Mapping[str, str]
) -> dict[str, tuple[int, ...]]:
    """Return the input axis that each output axis came from."""
    found: dict[str, dict[int, int]] = {name: {} for name in shapes}
    for axis in range(max(map(len, shapes.values()), default=0)):
        with _unchanged(model):
            results = _sanitize(model, {n: _ramp(s, axis) for n, s in shapes.items()})
        for name, shape in shapes.items():
            # Axes of size 1 cannot be told apart, and need not be.
            if axis < len(shape) and shape[axis] > 1:
                found[name][_varying_axis(results[renamed[name]])] = axis
    out = {}
    for name, shape in shapes.items():
        rest = iter([a for a in range(len(shape)) if a not in found[name].values()])
        out[name] = tuple(
            found[name][a] if a in found[name] else next(rest, -1)
            for a in range(len(shape))
        )
    return out


def _ramp(shape: tuple[int, ...], axis: int) -> mx.array:
    if axis >= len(shape):
        return mx.broadcast_to(mx.array(0.0), shape)
    ramp = mx.arange(shape[axis]).astype(mx.float32)
    return mx.broadcast_to(
        ramp.reshape([-1 if a == axis else 1 for a in range(len(shape))]), shape
    )


def _varying_axis(array: mx.array) -> int:
    for axis in range(array.ndim):
        if array.shape[axis] > 1:
            at = [0] * array.ndim
            at[axis] = 1
            if array[tuple(at)].item() != 0:
                return axis
    return -1


def _first(array: Any) -> int | None:
    if not isinstance(array, mx.array) or not array.size:
        return None
    value: Any = array.reshape(-1)[0].item()
    return int(value) if value == int(value) else None


def _sanitize(model: nn.Module, weights: dict[str, mx.array]) -> dict[str, mx.array]:
    try:
        try:
            return dict(model.sanitize(dict(weights)))
        except KeyError as error:
            # sanitize removes a child that an earlier call already removed.
            child = error.args[0] if error.args else None
            if not isinstance(child, str) or child in model or child in weights:
                raise
            dict.__setitem__(model, child, nn.Module())
            try:
                return dict(model.sanitize(dict(weights)))
            finally:
                dict.pop(model, child, None)
    except Exception as error:  # this is the model's own code
        raise ConvertError(
            f"The sanitize of {type(model).__name__} raised {type(error).__name__}: "
            f"{error}"
        ) from error


@contextmanager
def _unchanged(model: nn.Module) -> Iterator[None]:
    """Undo a probe's changes to the model's modules and attributes."""
    saved = [(m, dict(m), dict(vars(m))) for m in model.modules()]
    try:
        yield
    finally:
        for module, children, attributes in saved:
            dict.clear(module)
            dict.update(module, children)
            vars(module).clear()
            vars(module).update(attributes)
