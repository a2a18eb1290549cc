"""Map PyTorch names to the parameters of an MLX model.

Wrappers (DistributedDataParallel, torch.compile, FSDP, Lightning) add words to names,
PEFT has its own names, and mlx-lm models have a ``sanitize`` that converts from
Transformers' names. It is called once with marked arrays, so that each output shows
which input, and which of its axes, it came from.
"""

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from .tree import ConvertError

Shape = tuple[int, ...]

# Words added by DistributedDataParallel, torch.compile, FullyShardedDataParallel and
# activation checkpointing.
_WRAPPERS = re.compile(
    r"(^|(?<=\.))(module|_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\."
)
# The usual attribute of a LightningModule; GPT-2 with a head in Transformers.
_PREFIXES = ("model.", "transformer.")
# base_model.model.<path>.lora_A[.<adapter>].weight
_PEFT = "base_model.model."
_ADAPTER = re.compile(r"(.+)\.lora_([AB])(?:\.\w+)?\.weight")

# Layout -> the PyTorch axis behind each of MLX's n axes.
AXES: dict[str, Callable[[int], Shape]] = {
    "same": lambda n: tuple(range(n)),
    # (in, out) <-> (out, in): Transformers' Conv1D, PEFT's LoRA
    "transpose": lambda n: (1, 0, *range(2, n)),
    # (out, in, *kernel) <-> (out, *kernel, in); nn.Bilinear: (out, in1, in2)
    "conv": lambda n: (0, *range(2, n), 1),
    # (in, out, *kernel) <-> (out, *kernel, in)
    "conv_transpose": lambda n: (*range(1, n), 0),
}
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


@dataclass(frozen=True)
class Target:
    """Parameters of the model: their names, shapes, and layout."""

    mlx: tuple[str, ...]
    shapes: tuple[Shape, ...]
    layout: str | None  # None: not one of MLX's own layers


@dataclass
class Names:
    """The MLX names of a state dict.

    Attributes:
        new (dict): PyTorch name -> MLX name, and the layout where the name implies it;
            None if the model's ``sanitize`` drops the tensor.
        known (dict): The names that the model accepts.
        change_model (Callable): Applies the changes of ``sanitize`` to the model. Gemma
            3 loses its ``lm_head`` if the checkpoint has none.
    """

    new: dict[str, tuple[str, str | None] | None]
    known: dict[str, Target]
    change_model: Callable[[], None] = lambda: None


def unwrap(name: str) -> str:
    """Remove the words that wrappers insert into a name.

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


def find_names(
    shapes: Mapping[str, Shape], rename: Callable[[str], str], model: nn.Module
) -> Names:
    """Find the MLX name of each tensor."""
    has_sanitize = hasattr(model, "sanitize") and not is_adapter(shapes)
    known = known_names(model)
    best, best_hits = Names({}, known), -1
    for candidate in _rename_candidates(rename):
        plain = {name: from_peft(candidate(name)) for name in shapes}
        names = Names({**plain}, known)
        if has_sanitize:
            names = _after_sanitize(model, plain, shapes)
        found = [new[0] for new in names.new.values() if new is not None]
        hits = sum(new in names.known for new in found)
        if hits > best_hits:  # the first of equals: strip as little as possible
            best, best_hits = names, hits
        if hits == len(shapes):
            break
    return best


def _rename_candidates(rename: Callable[[str], str]) -> Iterator[Callable[[str], str]]:
    """Yield functions that may map PyTorch's names to the model's, simplest first."""
    yield rename
    for prefix in ("", *_PREFIXES):
        yield partial(lambda p, name: unwrap(rename(name)).removeprefix(p), prefix)
        yield partial(lambda p, name: rename(unwrap(name).removeprefix(p)), prefix)


def known_names(model: nn.Module) -> dict[str, Target]:
    """Return the PyTorch names, in either spelling, that a model accepts."""
    modules = dict(model.named_modules())
    known: dict[str, Target] = {}
    for name, array in tree_flatten(model.parameters()):
        words = name.split(".")
        owner = modules.get(".".join(words[:-1]))
        layout = None if array.ndim > 2 else "same"
        if words[-1] == "weight" and isinstance(owner, (*CONVOLUTIONS, nn.Bilinear)):
            layout = "conv"
        elif words[-1] == "weight" and isinstance(owner, TRANSPOSED):
            layout = "conv_transpose"
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


def _after_sanitize(
    model: nn.Module,
    plain: Mapping[str, tuple[str, str | None]],
    shapes: Mapping[str, Shape],
) -> Names:
    """Return the names after ``sanitize``, which does not see LoRA adapters."""
    asked = {new: shapes[name] for name, (new, layout) in plain.items() if not layout}
    before = _contents(model)
    try:
        found = probe_sanitize(model, asked)
        after, known = _contents(model), known_names(model)
    finally:
        _restore(before)
    new = {
        name: (new, layout) if layout else found.get(new)
        for name, (new, layout) in plain.items()
    }
    return Names(new, known, lambda: _restore(after))


# Contents of a model's modules: parameters and submodules, other attributes.
_Contents = list[tuple[nn.Module, dict[str, Any], dict[str, Any]]]


def _contents(model: nn.Module) -> _Contents:
    return [(m, dict(m), dict(vars(m))) for m in model.modules()]


def _restore(contents: _Contents) -> None:
    for module, children, attributes in contents:
        dict.clear(module)
        dict.update(module, children)
        vars(module).clear()
        vars(module).update(attributes)


# Marks are odd multiples of this, so that a sum or a double is not taken for a mark.
_APART = 101


def probe_sanitize(
    model: nn.Module, shapes: Mapping[str, Shape]
) -> dict[str, tuple[str, str | None]]:
    """Find the new name and the layout of each tensor that ``sanitize`` keeps.

    Anything beyond renaming and transposing is an error.

    Example:
        >>> class Model(nn.Module):
        ...     def sanitize(self, weights):
        ...         return {f"model.{k}": v.T for k, v in weights.items()}
        >>> probe_sanitize(Model(), {"w": (2, 3)})
        {'w': ('model.w', 'transpose')}
    """
    marks = {name: _APART * (2 * i + 1) for i, name in enumerate(shapes)}
    names = {mark: name for name, mark in marks.items()}
    marked = {name: _mark(marks[name], shape) for name, shape in shapes.items()}
    found: dict[str, tuple[str, str | None]] = {}
    for new, array in _sanitize(model, marked).items():
        is_array = isinstance(array, mx.array) and array.size > 0
        old = names.get(_at(array, {})) if is_array else None
        axes = () if old is None else _trace_axes(array, marks[old], shapes[old])
        layout = next((kind for kind, of in AXES.items() if of(len(axes)) == axes), "")
        if old is None or axes == (-1,) or not layout or old in found:
            what = f"{old} becomes {new}" if old else f"{new} is computed"
            raise ConvertError(
                f"{type(model).__name__}.sanitize does more than rename and transpose: "
                f"{what}. Pass the model as MODULE:NAME, and names and layouts with "
                "--rename and --layout."
            )
        found[old] = (new, layout)
    return found


def _mark(mark: int, shape: Shape) -> mx.array:
    """Return an array with ``mark`` at 0 and ``mark + a + 1`` at 1 along axis a.

    It is a view of a small buffer: the steps along the axes are 1, 2, 3 and so on.
    """
    if 0 in shape:
        return mx.zeros(shape)
    size = sum((n - 1) * (axis + 1) for axis, n in enumerate(shape)) + 1
    buffer = mx.arange(size).astype(mx.float32) + mark
    return mx.as_strided(buffer, shape, [axis + 1 for axis in range(len(shape))])


def _at(array: mx.array, index: Mapping[int, int]) -> Any:
    return array[tuple(index.get(axis, 0) for axis in range(array.ndim))].item()


def _trace_axes(array: mx.array, mark: int, shape: Shape) -> Shape:
    """Return the input axis behind each output axis; (-1,) if there is none."""
    found = {
        axis: int(_at(array, {axis: 1})) - mark - 1
        for axis, size in enumerate(array.shape)
        if size > 1
    }
    # Axes of size 1 cannot be told apart, and need not be.
    rest = iter([a for a in range(len(shape)) if a not in found.values()])
    axes = tuple(
        found[axis] if axis in found else next(rest, -1) for axis in range(array.ndim)
    )
    is_moved = sorted(axes) == [*range(len(shape))] and array.shape == tuple(
        shape[a] for a in axes
    )
    return axes if is_moved else (-1,)


def _sanitize(model: nn.Module, weights: dict[str, mx.array]) -> dict[str, Any]:
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
            f"{type(model).__name__}.sanitize raised {type(error).__name__}: {error}"
        ) from error
