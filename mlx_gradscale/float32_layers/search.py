"""Find the fewest layers that must be float32 for a model to train in float16."""

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from ..core.gradients import refuse_scaled
from ..core.masters import HALF
from .calls import is_inside
from .faults import (
    Place,
    find_fault,
    first_backward,
    first_forward,
    too_large_arguments,
)
from .report import LARGEST, Float32Search, Reason, make_report
from .trial import Batch, Call, Run, Setting, Value, is_one_of, run
from .where import THE_LOSS, TO, resolve, resolve_paths

# Relative distance from float32. Rounding of a value between two layers causes less, a
# sum that overflowed causes more. The second is tried if nothing exceeds the first.
_FAR, _SUSPICIOUS = 0.25, 0.05
# Additive masks have magnitudes like this.
_MASK = 1e4
# Gradients are rounded more often than the loss, namely in both passes.
_GRADIENT_TOLERANCE = 10
_MAX_SCALE, _MIN_SCALE = 2.0**16, 2.0**-40

_logger = logging.getLogger(__name__)


class NoCureFound(Exception):
    """Raised with the reason why no float32 layers make the model train in float16."""


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
    """Find which layers must compute in float32, and verify that they suffice.

    Runs every batch in float32 and in half precision, forward and backward. If a value
    between layers comes within ``margin`` of 65504, the layers from its source to its
    last reader become float32, as does a layer whose output is non-finite or far from
    the float32 output. Finally, loss and gradients must agree with float32.

    The model is unchanged afterwards: pass the result to
    :func:`mlx_gradscale.float32_layers`, or save it for later. Each trial run is logged
    at level INFO.

    Args:
        model (nn.Module): The model, either in half precision or for use with
            ``compute_dtype``.
        loss_fn (Callable): As for ``nn.value_and_grad``, without ``scale_loss``.
        batches (Iterable): Arguments of ``loss_fn`` for each batch: a tuple, a dict of
            keywords, or a single argument. A few typical batches suffice.
        compute_dtype (Dtype, optional): As for ``GradScaler.value_and_grad``.
        cast_inputs (bool): As for ``GradScaler.value_and_grad``.
        margin (float): By what factor values may grow during training before they
            overflow. Default: ``2.0``.
        tolerance (float): The allowed relative distance of the loss from the float32
            loss. All gradients together may be ten times as far. Default: ``0.02``.

    Returns:
        Float32Search: The layers, the reason for each, and the largest values of every
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
        >>> layers = float32_layers(model, found)
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"The model must be an mlx.nn.Module, got {model!r}.")
    refuse_scaled(loss_fn)
    if not 1.0 <= margin < math.inf:
        raise ValueError(f"margin must be at least 1, for example 2.0, got {margin!r}.")
    if not 0.0 < tolerance < 1.0:
        raise ValueError(f"tolerance must be between 0 and 1, got {tolerance!r}.")
    dtypes = [compute_dtype or x.dtype for _, x in tree_flatten(model.parameters())]
    if not any(dtype in HALF for dtype in dtypes):
        raise ValueError(
            "Nothing here is in half precision: pass compute_dtype=mx.float16, or call "
            "model.set_dtype(mx.float16) before."
        )
    if isinstance(batches, (mx.array, dict, str)) or not isinstance(batches, Iterable):
        raise TypeError(
            "batches must be a list whose elements are the arguments of loss_fn, got "
            f"{type(batches).__name__}."
        )
    checked = [_as_batch(batch) for batch in batches]
    if not checked:
        raise ValueError("There are no batches: pass at least one.")
    setting = Setting(model, loss_fn, compute_dtype, cast_inputs)
    return search_batches(setting, checked, margin, tolerance)


def _as_batch(batch: Any) -> Batch:
    if isinstance(batch, (tuple, list)):
        return Batch(tuple(batch))
    # A model is also a dict.
    return Batch((), batch) if type(batch) is dict else Batch((batch,))


def search_batches(
    setting: Setting, batches: Sequence[Batch], margin: float, tolerance: float
) -> Float32Search:
    """Like :func:`find_float32_layers`, for validated arguments."""
    search = Search(setting, margin, tolerance)
    problem = ""
    try:
        for i, batch in enumerate(batches):
            search.add(batch, f"batch {i + 1}")
        search.finish()
    except NoCureFound as error:
        search.reasons, problem = [], str(error)
    runs = search.references, search.halves
    return make_report(setting, *runs, search.reasons, problem)


class Search:
    """The layers found so far, and the batches tried with them."""

    def __init__(self, setting: Setting, margin: float = 2.0, tolerance: float = 0.02):
        self.setting = setting
        self.reasons: list[Reason] = []
        self.batches: list[Batch] = []
        self.references: list[Run] = []
        self.halves: list[Run] = []
        self._limit = LARGEST / margin
        self._tolerance = tolerance
        # Arguments passed in by the loss function are already in half precision.
        self._given: list[float] = []

    @property
    def where(self) -> list[str]:
        """The layers found so far, without layers nested in others."""
        return self._outermost(self.reasons)

    def add(self, batch: Batch, name: str) -> None:
        """Run a batch in float32 and add the layers whose values are too large."""
        _logger.info("%s in float32", name)
        reference = run(self.setting, batch, in_float32=True)
        self._check(batch, reference, name)
        self.batches.append(batch)
        self.references.append(reference)
        calls = reference.loss_call
        self._given = [v.magnitude for call in calls.children for v in call.inputs]
        self._cover_large_values(calls)

    def finish(self) -> None:
        """Add layers until all batches agree with float32; drop unnecessary ones."""
        tried = None
        while tried != self.where:
            tried = self.where
            pairs = zip(self.batches, self.references, strict=True)
            self.halves = [self._grow(batch, reference) for batch, reference in pairs]
        # The last one was needed in addition to all the others.
        for reason in [each for each in self.reasons[:-1] if not each.by_size]:
            others = [each for each in self.reasons if each is not reason]
            where, halves = self._outermost(others), []
            for batch, reference in zip(self.batches, self.references, strict=True):
                halves.append(self._run_scaled(batch, reference, where))
                if self._is_lossy(halves[-1], reference):
                    break
            else:
                self.reasons, self.halves = others, halves

    def _check(self, batch: Batch, reference: Run, name: str) -> None:
        """Raise if no layers can help, before blaming float16."""
        fault = find_fault(self.setting, batch, reference)
        if fault is None:
            for path, reached in too_large_arguments(self.setting, batch).items():
                raise NoCureFound(
                    f"{path} of {name} reaches {reached:.6g} and is not finite after "
                    "the cast to compute_dtype: normalise it, or pass "
                    "cast_inputs=False."
                )
            return
        leaves = ", ".join(leaf.path for leaf in fault.leaves[:5])
        why = {
            "batch": f"Repair the samples with NaN or inf, or drop them: {leaves}.",
            "parameters": "Go back to a checkpoint from before these weights became "
            f"NaN or inf: {leaves}.",
        }
        other = (
            f"{fault.text} The loss is {reference.loss}. Look for a logarithm, a "
            "division or a root of zero, and for a cast to half precision."
        )
        raise NoCureFound(
            f"{name} is not finite in float32 either. {why.get(fault.cause, other)}"
        )

    # Values between layers, whose size is known from the float32 run.

    def _cover_large_values(self, call: Call) -> None:
        large = [c for c in call.children if self._is_large(c.inputs + c.outputs)]
        for child in call.children:
            if child not in large:
                self._cover_large_values(child)
        inside = self._paths(self.where) if large else []
        if all(any(is_inside(c.path or "", p) for p in inside) for c in large):
            return
        entry, source = self._chain_for(call, call.children.index(large[0]))
        edges = [v for child in call.children for v in child.inputs + child.outputs]
        largest = max(value.magnitude for value in edges)
        above = "above 65504" if largest > LARGEST else "close to 65504"
        why = f"values of {largest:.3g}, {above}"
        self.reasons.append(Reason(entry, source, why, by_size=True))

    def _chain_for(self, call: Call, first: int) -> tuple[str, str | None]:
        """Return the shortest chain for large values of a call, and their source."""
        children = call.children
        is_made_between = self._is_large(children[first].inputs)
        source = call.path if is_made_between else children[first].path
        if is_made_between and call.path is not None:
            if self._share(call.path) <= 0.5 or first == 0:
                return call.path, source
            first -= 1
        readers = [i for i, c in enumerate(children) if self._is_large(c.inputs)]
        makers = [i for i, c in enumerate(children) if self._is_large(c.outputs)]
        last = max([*readers, *(i + 1 for i in makers)])
        if last < len(children):
            return self._name_chain(children[first : last + 1]), source
        if call.path:
            return call.path, source
        # The value passes through the whole model to the loss function.
        return f"{self._name_chain(children[first:])}{TO}{THE_LOSS}", source

    def _name_chain(self, calls: list[Call]) -> str:
        paths = list(dict.fromkeys(call.path or "" for call in calls))
        short = TO.join([paths[0], paths[-1]]) if len(paths) > 1 else paths[0]
        is_exact = self._paths([short]) == paths
        return short if is_exact else TO.join(paths)

    def _is_large(self, values: list[Value]) -> bool:
        large = [v.magnitude for v in values if v.magnitude >= self._limit]
        return any(not is_one_of(x, self._given) for x in large)

    # Faults inside layers, detected where half precision deviates from float32.

    def _grow(self, batch: Batch, reference: Run) -> Run:
        while True:
            half = self._run_scaled(batch, reference, self.where)
            if not self._is_lossy(half, reference):
                return half
            place, why = self._first_fault(half, reference)
            if place is None or place.layer is None:
                self._give_the_loss_float32(batch, reference, why)
                continue
            path = place.layer
            inside = self._paths(self.where)
            while any(is_inside(path, each) for each in inside):
                if not path:
                    raise NoCureFound(
                        f"With the whole model in float32: {why}. Look at the loss "
                        "function: it, or the model, casts to half precision itself."
                    )
                path = _caller_of(reference, path)
            self.reasons.append(Reason(path, path, why))

    def _first_fault(self, half: Run, reference: Run) -> tuple[Place | None, str]:
        """Return where half precision deviates from float32, None for the loss."""
        pairs = _pair(half.forward, reference.forward)
        loss_is_off = self._is_lossy(half, reference, gradients=False)
        for distance in (_FAR, _SUSPICIOUS) if loss_is_off else (_FAR,):
            place = first_forward(half, partial(_is_bad, pairs, distance))
            if place:
                return place, _how_far(place.value, pairs)
        if loss_is_off:
            return None, f"the loss is {half.loss:.4g}, not {reference.loss:.4g}"
        pairs = _pair(half.backward, reference.backward)
        pairs |= {id(x): reference.gradients[p] for p, x in half.gradients.items()}
        place = first_backward(half, partial(_is_bad, pairs, _FAR))
        if place is None:
            distance = half.gradient_distance(reference)
            allowed = _GRADIENT_TOLERANCE * self._tolerance
            raise NoCureFound(
                f"Nothing overflows, but rounding moves the gradients {distance:.0%} "
                f"away from those of float32, and {allowed:.0%} are allowed: pass "
                f"tolerance={distance / _GRADIENT_TOLERANCE * 1.5:.2g} to accept that."
            )
        at_scale = f"in the backward pass at a loss scale of {half.scale:g}"
        return place, f"{place.text}: {_how_far(place.value, pairs)}, {at_scale}"

    def _give_the_loss_float32(self, batch: Batch, reference: Run, why: str) -> None:
        """Make one of the last layers pass float32 to the loss function."""
        paths = [value.path for value in reference.forward if value.side == "output"]
        # A tied embedding is called twice: its first output would also be float32.
        once = [p for p in reversed(paths) if p and paths.count(p) == 1]
        single = [p for p in once if not any(q != p and is_inside(q, p) for q in paths)]
        for path in [*single[:8], ""]:
            entry = f"{path}{TO}{THE_LOSS}"
            if any(reason.entry == entry for reason in self.reasons):
                break
            half = self._run_scaled(batch, reference, [*self.where, entry])
            if not self._is_lossy(half, reference, gradients=False):
                self.reasons.append(Reason(entry, path, f"{why} in half precision"))
                return
        raise NoCureFound(
            f"{why}, also if it is computed from float32: look at the loss function, "
            "which casts to half precision itself or divides by zero."
        )

    def _is_lossy(self, half: Run, reference: Run, gradients: bool = True) -> bool:
        off = abs(half.loss - reference.loss)
        # Negated so that a NaN loss counts as off.
        if not off <= self._tolerance * max(abs(reference.loss), 1e-6):
            return True
        allowed = _GRADIENT_TOLERANCE * self._tolerance
        is_close = half.gradient_distance(reference) <= allowed
        return gradients and not (half.has_finite_gradients and is_close)

    def _run_scaled(self, batch: Batch, reference: Run, where: Sequence[str]) -> Run:
        """Run in half precision at the scale that a dynamic scaler would find."""
        inside = self._paths(where)
        outside = [
            value.largest
            for value in [*reference.backward, *reference.gradients.values()]
            if not any(is_inside(value.path, each) for each in inside)
        ]
        largest = max(outside, default=0.0)
        power = math.floor(math.log2(self._limit / largest)) if largest > 0 else 16
        scale = min(max(2.0**power, _MIN_SCALE), _MAX_SCALE)
        while True:
            _logger.info("in half precision with float32 layers %s", where)
            half = run(self.setting, batch, where, scale=scale)
            overflows = math.isfinite(half.loss) and not half.has_finite_gradients
            if not overflows or scale <= _MIN_SCALE:
                return half
            scale = max(scale * 2.0**-8, _MIN_SCALE)

    def _outermost(self, reasons: Sequence[Reason]) -> list[str]:
        chains = resolve(self.setting.model, [reason.entry for reason in reasons])
        return [chain.entry for chain in chains]

    def _paths(self, where: Sequence[str]) -> list[str]:
        return resolve_paths(self.setting.model, where)

    def _share(self, path: str) -> float:
        parameters = tree_flatten(self.setting.model.parameters())
        total = sum(x.size for _, x in parameters)
        inside = sum(x.size for p, x in parameters if is_inside(p, path))
        return float(inside / max(total, 1))


def _is_bad(references: dict[int, Value], distance: float, value: Value) -> bool:
    """Return whether a value that matters is non-finite or far from its reference."""
    reference = references.get(id(value))
    if reference is None or not reference.is_finite:
        return False
    is_far = value.distance(reference) >= distance
    if reference.has_gradient:
        return not value.is_finite or is_far
    is_mask = reference.largest > _MASK and reference.maximum < _MASK
    return bool(value.nan or value.positive_inf) or (is_far and not is_mask)


def _pair(values: list[Value], references: list[Value]) -> dict[int, Value]:
    """Return the reference of each value, by value id."""
    waiting: dict[tuple[str, str], list[Value]] = {}
    for value in references:
        waiting.setdefault((value.path, value.side), []).append(value)
    pairs = {}
    for value in values:
        same = waiting.get((value.path, value.side))
        if same:
            pairs[id(value)] = same.pop(0)
    return pairs


def _how_far(value: Value, references: dict[int, Value]) -> str:
    if not value.is_finite:
        return str(value)
    return f"{min(value.distance(references[id(value)]), 9.99):.0%} away from float32"


def _caller_of(reference: Run, path: str) -> str:
    callers = [value.caller for value in reference.forward if value.path == path]
    return (callers[0] if callers else path.rpartition(".")[0]) or ""
