"""Find the layers of a half-precision model that must compute in float32."""

import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from ..core.forward import Casting
from ..core.gradients import check_loss_fn
from .layers import float32_layers
from .report import Float32Search, Row
from .trace import Call, floats, magnitude, measure
from .trial import Check, Trial, preserved
from .where import TO, TO_THE_LOSS, is_inside, resolve

# Seconds before progress is printed: shorter work ends before anyone wonders.
_DELAY = 3.0
# The error of a layer that is wrong in half precision. Rounding stays below, but for a
# choice between two near values, such as experts; an overflow in a sum exceeds it.
_FAR = 0.25
_LOOK = (
    "Look for values that grow too large, a logarithm or square root of zero, a "
    "division by zero, or a cast to half precision."
)


def find_float32_layers(
    model: nn.Module,
    loss_fn: Callable[..., Any],
    batches: Iterable[Any],
    *,
    compute_dtype: mx.Dtype | None = None,
    cast_inputs: bool = True,
    margin: float = 2.0,
    tolerance: float = 0.02,
) -> Float32Search:
    """Find the layers that must compute in float32, and verify that they suffice.

    Every batch runs once in float32, where each layer also runs in half precision on
    its float32 inputs. If a value between layers comes within a factor of ``margin`` of
    the dtype's maximum, 65504 for float16, the search selects all layers from the one
    that computes this value to the last one that reads it. Then loss and gradients in
    half precision must match float32. While the loss does not, the search adds the
    layers whose outputs differ, the last layer before the loss, or the whole model.

    For each batch, this takes the time of about six training steps if no layers are
    wrong, and of at most about thirty. The model must fit into memory in float32, with
    the gradients of two passes. On a terminal, a search that takes longer than three
    seconds prints its runs to stderr. The search does not change the model. Pass the
    result to :func:`mlx_gradscale.float32_layers`, or save it for later.

    Args:
        model (nn.Module): The model, in half precision unless ``compute_dtype`` is
            given.
        loss_fn (Callable): Same as in ``nn.value_and_grad``, not from ``scale_loss``.
        batches (Iterable): The arguments of ``loss_fn`` for each batch, as a tuple or
            list, a dict of keyword arguments, or a single argument. A few typical
            batches suffice.
        compute_dtype (Dtype, optional): Same as in ``GradScaler.value_and_grad``.
        cast_inputs (bool): Same as in ``GradScaler.value_and_grad``.
        margin (float): The factor by which values may grow during training before they
            overflow. Default: ``2.0``.
        tolerance (float): The allowed relative difference between the loss and the
            float32 loss. The gradients may differ by ten times as much. Default:
            ``0.02``.

    Returns:
        Float32Search: The layers, the reason for each, and the largest value of every
        layer. If no layers help, its ``problem`` says why.

    Example:
        >>> import mlx.core as mx, mlx.nn as nn
        >>> from mlx_gradscale import find_float32_layers, float32_layers
        >>> model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(3)))
        >>> for layer, gain in zip(model.layers, (1.0, 3e4, 1e-4)):
        ...     layer.weight = mx.eye(8, dtype=mx.float16) * gain
        >>> def loss_fn(x):
        ...     return model(x).astype(mx.float32).square().mean()
        >>> x = mx.full((4, 8), 3, mx.float16)
        >>> found = find_float32_layers(model, loss_fn, [x])
        >>> found.where
        ['layers.1 to layers.2']
        >>> float32_layers(model, found)
        ['layers.1', 'layers.2']
    """
    check_loss_fn(loss_fn)
    if not 1.0 <= margin < math.inf:
        raise ValueError(f"margin must be finite and at least 1, got {margin!r}.")
    if not 0.0 < tolerance < 1.0:
        raise ValueError(f"tolerance must be between 0 and 1, got {tolerance!r}.")
    if isinstance(batches, (mx.array, dict, str)) or not isinstance(batches, Iterable):
        raise TypeError(
            "batches must be a list with the arguments of loss_fn for each batch, got "
            f"{type(batches).__name__}. Put a single batch in a list."
        )
    batches = list(batches)
    if not batches:
        raise ValueError("batches is empty. Pass at least one batch.")
    casting, trials = Casting(compute_dtype, cast_inputs=cast_inputs), []
    for i, batch in enumerate(batches, start=1):
        # Not isinstance, because a model is also a dict.
        named = batch if type(batch) is dict else {}
        args = () if named is batch else batch
        args = tuple(args) if isinstance(args, (tuple, list)) else (args,)
        name = f"Batch {i} of {len(batches)}" if len(batches) > 1 else Trial.name
        trials.append(Trial(model, loss_fn, args, named, casting, name))
    if trials[0].half is None:
        raise ValueError(
            "The model does not compute in half precision. Pass compute_dtype="
            "mx.float16, or call model.set_dtype(mx.float16) first."
        )
    return search(trials, tolerance, margin)


def search(
    trials: Sequence[Trial], tolerance: float, margin: float = 1.0
) -> Float32Search:
    """Run the search of :func:`find_float32_layers` on one trial per batch."""
    model, start = trials[0].model, time.monotonic()

    def show(trial: Trial, run: str) -> None:
        if sys.stderr.isatty() and time.monotonic() - start >= _DELAY:
            text = f"Search for float32 layers: {trial.name} {run}"
            print(text, file=sys.stderr, flush=True)

    # Measure every layer, and select those that exchange large values.
    reasons: dict[str, str] = {}
    roots, losses = [], []
    for trial in trials:
        show(trial, "in float32, and each layer in half precision")
        with _selected(model, []):
            root, loss = measure(trial)
        if not math.isfinite(loss):
            return Float32Search([], problem=_explain_loss(trial, root, loss))
        reasons |= _find_large(trial, root, margin, _paths(model, reasons))
        roots.append(root)
        losses.append(loss)
    # Verify the selection on every batch, and widen it while a loss is wrong.
    wider = _wider_choices(roots)
    added: dict[str, str] = {}
    checks: list[Check] = []
    while len(checks) < len(trials):
        trial, expected = trials[len(checks)], losses[len(checks)]
        show(trial, "in half precision, compared with float32")
        with _selected(model, reasons | added):
            found = trial.verify(expected, tolerance)
        if found.is_good:
            checks.append(found)
        elif found.is_loss_off and wider:
            added, checks = wider.pop(0), []
        else:
            return Float32Search([], problem=_explain(trial, expected, found))
    where = list(resolve(model, reasons | added))
    inside = _paths(model, where)
    return Float32Search(
        where,
        {entry: (reasons | added)[entry] for entry in where},
        _rows(roots, inside, trials[0].maximum),
        losses=[(x, found.loss) for x, found in zip(losses, checks, strict=True)],
        float16_parameters=1.0 - _share(model, inside),
        scale=min(found.scale for found in checks),
    )


@contextmanager
def _selected(model: nn.Module, where: Iterable[str]) -> Iterator[None]:
    """Select float32 layers within a ``with`` block."""
    with preserved(model):
        float32_layers(model, list(where))
        yield


def _paths(model: nn.Module, where: Iterable[str]) -> list[str]:
    return [path for paths in resolve(model, where).values() for path in paths]


def _share(model: nn.Module, paths: Sequence[str]) -> float:
    """Return the share of a model's parameters inside some modules."""
    sizes = {path: x.size for path, x in tree_flatten(model.parameters())}
    inside = sum(size for path, size in sizes.items() if is_inside(path, *paths))
    return float(inside / max(sum(sizes.values()), 1))


def _find_large(
    trial: Trial, root: Call, margin: float, known: list[str]
) -> dict[str, str]:
    """Return the layers that exchange values near or above the maximum, and why."""
    # The batch itself can be large, but training does not change it.
    given = {float(magnitude([x])) for x in floats((trial.args, trial.kwargs))}
    maximum = trial.maximum

    def is_large(size: float) -> bool:
        return size >= maximum / margin and size not in given

    found: dict[str, str] = {}
    for chain, is_to_loss in _find_chains(trial.model, root, is_large):
        if not all(is_inside(x.path or "", *known) for x in chain):
            largest = max(x.largest for x in chain)
            text = "above" if largest > maximum else "close to"
            text = f"Values reach {largest:.3g}, {text} {maximum:g}."
            found |= dict.fromkeys(_name(trial.model, chain, is_to_loss), text)
    return found


def _find_chains(
    model: nn.Module,
    call: Call,
    is_large: Callable[[float], bool],
    is_to_loss: bool = False,
) -> list[tuple[list[Call], bool]]:
    """Return chains of calls that exchange large values, and whether with the loss."""
    # Example: a model calls embed, blocks.0, blocks.1, norm and head in this order. If
    # blocks.1 returns 1e5, norm reads it: "blocks.1 to norm". If the model's own code
    # multiplies the output of embed by 1e6, blocks.0 is the first to read it, so the
    # chain starts one call earlier: "embed to norm". If head returns 1e5: "head to the
    # loss". If blocks.0 itself multiplies the output of its last layer: "blocks.0".
    children = call.children
    made = [False, *(is_large(x.largest_output) for x in children)]
    read = [*(is_large(x.largest_input) for x in children), False]
    # Number i is the place before child i.
    large = [i for i, pair in enumerate(zip(made, read, strict=True)) if any(pair)]
    chain = children[max(large[0] - 1, 0) : large[-1] + 1] if large else []
    others = (x for x in children if x not in chain)
    found = [y for x in others for y in _find_chains(model, x, is_large)]
    if not large:
        return found
    # The call's own code may compute the value, or use the last one.
    computes, uses = not made[large[0]], large[-1] == len(children)
    if call.path and not is_to_loss:
        is_small = large[0] == 0 or _share(model, [call.path]) <= 0.5
        if uses or (computes and is_small):
            return [*found, ([call], False)]
    elif uses and len(chain) == 1 and not read[-2]:
        # If a model returns a large value of its last layers, select only these.
        inner = _find_chains(model, chain[0], is_large, is_to_loss=True)
        if inner and inner[-1][1]:
            return found + inner
    return [*found, (chain, uses)]


def _name(model: nn.Module, chain: list[Call], is_to_loss: bool) -> list[str]:
    """Return the entry of a chain, or a list of them that select the same layers."""
    paths = list(dict.fromkeys(x.path or "" for x in chain))
    entries = [TO.join(dict.fromkeys([paths[0], paths[-1]]))]
    if _paths(model, entries) != paths:  # the model defines them in another order
        entries = [TO.join(pair) for pair in pairwise(paths)]
    return [*entries[:-1], entries[-1] + TO_THE_LOSS * is_to_loss]


def _wider_choices(roots: list[Call]) -> list[dict[str, str]]:
    """Return what can be added to the selection, from single layers to the model."""

    def describe(call: Call) -> str:
        off = f"off by {call.error:.0%}" if call.error < math.inf else "non-finite"
        text = f"Values reach {call.largest:.3g}, and its output is {off}"
        return f"{text} in half precision."

    calls = [x for root in roots for x in root.walk() if x.error >= _FAR]
    all_wrong = {x.path or "": describe(x) for x in calls}
    # A layer is wrong by itself if no layer inside it is wrong.
    inner = [x for x in calls if sum(y.error >= _FAR for y in x.walk()) == 1]
    wrong = {x.path or "": describe(x) for x in inner}
    paths = [x.path for x in roots[0].walk() if x.path and not x.children]
    # Not a layer called twice, such as a tied embedding: both outputs would change.
    last = [path for path in paths if paths.count(path) == 1][-1:]
    text = "The loss function is wrong in half precision."
    to_loss = {f"{path}{TO_THE_LOSS}": text for path in last}
    whole = {TO_THE_LOSS: all_wrong.pop("", text)}
    choices = [wrong, all_wrong, wrong | to_loss, all_wrong | to_loss, whole]
    return [choice for choice in choices if choice]


def _rows(roots: list[Call], inside: list[str], maximum: float) -> list[Row]:
    largest: dict[str, float] = {}
    for call in (call for root in roots for call in root.walk()):
        if call.path is not None:
            largest[call.path] = max(call.largest, largest.get(call.path, 0.0))
    return [Row(k, x, is_inside(k, *inside), maximum) for k, x in largest.items()]


def _explain_loss(trial: Trial, root: Call, loss: float) -> str:
    text, _ = trial.find_bad_input()
    bad = (x.path for x in root.walk() if x.largest_output == math.inf)
    if not text and (path := next(bad, None)) is not None:
        text = f"The output of {path or 'the model'} is the first. {_LOOK}"
    text = text or f"The loss is {loss}. {_LOOK}"
    return f"{trial.name} gives non-finite values even in float32. {text}"


def _explain(trial: Trial, expected: float, found: Check) -> str:
    if found.is_loss_off:
        text = "Even computing the whole model in float32 is not enough. The loss is "
        return f"{text}{found.loss:.4g} instead of {expected:.4g}. {_LOOK}"
    if found.bad_gradients:
        text = f"{trial.name} gives non-finite gradients at every loss scale. The "
        text += "derivatives of sqrt and of a norm, for example, are inf or NaN at "
        return f"{text}zero, which an epsilon fixes."
    return (
        "Nothing overflows, but rounding or underflow changes the gradients by "
        f"{found.distance:.0%} compared with float32. Train in float32, or raise "
        "the tolerance of find_float32_layers."
    )
