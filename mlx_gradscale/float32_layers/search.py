"""Find the layers that must be float32 for a model to train in float16."""

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from ..core.gradients import refuse_scaled
from ..core.masters import HALF
from ..files.text import list_some
from .calls import is_inside, owner_of
from .faults import find_fault, first_fault
from .report import LARGEST, Float32Search, Row
from .trial import Batch, Call, Run, Setting, Value, run
from .where import THE_LOSS, TO, resolve

# A smaller distance from float32, tried if the loss is off but no value is far off.
_SUSPICIOUS = 0.05
# Gradients are rounded more often than the loss, namely in both passes.
_GRADIENT_TOLERANCE = 10
# The loss scale is lowered in steps of 2^8 until the gradients are finite.
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
        raise ValueError(f"margin must be finite and at least 1, got {margin!r}.")
    if not 0.0 < tolerance < 1.0:
        raise ValueError(f"tolerance must be between 0 and 1, got {tolerance!r}.")
    dtypes = [compute_dtype or x.dtype for _, x in tree_flatten(model.parameters())]
    if not any(dtype in HALF for dtype in dtypes):
        raise ValueError(
            "The model is not in half precision. Pass compute_dtype=mx.float16, or "
            "call model.set_dtype(mx.float16) first."
        )
    if isinstance(batches, (mx.array, dict, str)) or not isinstance(batches, Iterable):
        raise TypeError(
            "batches must be a list in which each element holds the arguments of "
            f"loss_fn, got {type(batches).__name__}."
        )
    checked = [_as_batch(batch) for batch in batches]
    if not checked:
        raise ValueError("batches is empty. Pass at least one batch.")
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
    search = _Search(setting, margin, tolerance)
    try:
        for i, batch in enumerate(batches):
            search.add(batch, f"batch {i + 1}")
        search.verify()
    except NoCureFound as error:
        search.reasons = {}
        return search.report(str(error))
    return search.report()


class _Search:
    """The layers found so far, and the batches tried with them."""

    def __init__(self, setting: Setting, margin: float, tolerance: float):
        self.setting = setting
        self.reasons: dict[str, str] = {}
        self.references: list[tuple[Batch, Run]] = []
        self.halves: list[Run] = []
        self._limit = LARGEST / margin
        self._tolerance = tolerance
        # Arguments passed in by the loss function are already in half precision.
        self._given: list[float] = []

    def add(self, batch: Batch, name: str) -> None:
        """Run a batch in float32 and add the layers whose values are too large."""
        _logger.info("%s in float32", name)
        reference = run(self.setting, batch, in_float32=True)
        fault = find_fault(self.setting, batch, reference)
        if fault is not None:
            leaves = list_some(leaf.path for leaf in fault.leaves)
            why = {
                "batch": f"The batch contains NaN or inf in {leaves}. Remove or repair "
                "these samples.",
                "parameters": f"The parameters contain NaN or inf in {leaves}. Go back "
                "to an earlier checkpoint.",
            }
            other = (
                f"{fault.text} The loss is {reference.loss}. Look for a logarithm, "
                "division or square root of zero, and for a cast to half precision."
            )
            raise NoCureFound(
                f"{name.capitalize()} gives non-finite values even in float32. "
                f"{why.get(fault.cause, other)}"
            )
        self.references.append((batch, reference))
        calls = reference.loss_call
        self._given = [v.magnitude for call in calls.children for v in call.inputs]
        self._cover_large_values(calls)

    def verify(self) -> None:
        """Add layers until all batches agree with float32."""
        tried = None
        while tried != list(self.reasons):
            tried = list(self.reasons)
            self.halves = [self._grow(*each) for each in self.references]

    def report(self, problem: str = "") -> Float32Search:
        """Return the layers found, and the largest values of all layers."""
        where = [chain.entry for chain in resolve(self.setting.model, self.reasons)]
        inside = self._paths(where)
        scale = min((half.scale for half in self.halves), default=1.0)
        runs = [reference for _, reference in self.references]
        seen = [value for run in runs for value in run.forward]
        forward = _largest((value.path, value.magnitude) for value in seen)
        returned = [x for run in runs for x in run.backward if x.side == "input"]
        backward = _largest((value.path, value.largest * scale) for value in returned)
        rows = [
            Row(
                path,
                largest,
                backward.get(path, 0.0),
                is_inside(path, *inside),
                self.reasons[path] if path in where else "",
                path in where and largest <= LARGEST,
            )
            for path, largest in forward.items()
        ]
        losses = [(a.loss, b.loss) for a, b in zip(runs, self.halves, strict=False)]
        reasons = {entry: self.reasons[entry] for entry in where}
        share = 1.0 - self._share(inside)
        return Float32Search(where, reasons, rows, problem, losses, scale, share)

    # Values between layers, whose size is known from the float32 run.

    def _cover_large_values(self, call: Call) -> None:
        large = [c for c in call.children if self._is_large(c.inputs + c.outputs)]
        for child in call.children:
            if child not in large:
                self._cover_large_values(child)
        inside = self._paths(self.reasons)
        if all(is_inside(c.path or "", *inside) for c in large):
            return
        entry = self._chain_for(call, call.children.index(large[0]))
        largest = max(v.magnitude for c in large for v in c.inputs + c.outputs)
        above = "above 65504" if largest > LARGEST else "close to 65504"
        self.reasons[entry] = f"values of {largest:.3g}, {above}"

    def _chain_for(self, call: Call, first: int) -> str:
        """Return the shortest chain for the large values between a call's children."""
        children = call.children
        if self._is_large(children[first].inputs) and call.path is not None:
            # The code of this layer made the value, between its children.
            if self._share([call.path]) <= 0.5 or first == 0:
                return call.path
            first -= 1
        readers = [i for i, c in enumerate(children) if self._is_large(c.inputs)]
        makers = [i for i, c in enumerate(children) if self._is_large(c.outputs)]
        last = max([*readers, *(i + 1 for i in makers)])
        if last < len(children):
            return self._name_chain(children[first : last + 1])
        if call.path:
            return call.path
        # The value passes through the whole model to the loss function.
        return f"{self._name_chain(children[first:])}{TO}{THE_LOSS}"

    def _name_chain(self, calls: list[Call]) -> str:
        paths = list(dict.fromkeys(call.path or "" for call in calls))
        short = TO.join(dict.fromkeys([paths[0], paths[-1]]))
        return short if self._paths([short]) == paths else TO.join(paths)

    def _is_large(self, values: list[Value]) -> bool:
        large = [v.magnitude for v in values if v.magnitude >= self._limit]
        given = self._given
        return any(all(abs(x - y) > 1e-3 * abs(y) for y in given) for x in large)

    # Faults inside layers, detected where half precision deviates from float32.

    def _grow(self, batch: Batch, reference: Run) -> Run:
        """Add layers until this batch agrees with float32."""
        called = {"", *(value.path for value in reference.forward)}
        while True:
            half = self._run_scaled(batch, [*self.reasons])
            if not self._is_lossy(half, reference):
                return half
            cause = find_fault(self.setting, batch, half)
            if cause is not None and cause.cause == "arguments":
                raise NoCureFound(
                    f"{cause.text} Normalise the argument, or pass cast_inputs=False."
                )
            loss_is_off = self._is_lossy(half, reference, gradients=False)
            fault = first_fault(half, reference, loss_is_off)
            if fault.cause == "loss":
                fault = first_fault(half, reference, loss_is_off, _SUSPICIOUS)
            if fault.cause == "gradients" and not fault.text:
                distance = half.gradient_distance(reference)
                tolerance = distance / _GRADIENT_TOLERANCE * 1.5
                raise NoCureFound(
                    "Nothing overflows, but rounding changes the gradients by "
                    f"{distance:.0%} compared with float32. Pass "
                    f"tolerance={tolerance:.2g} to accept this."
                )
            path = fault.layer
            if path is None:
                self._give_the_loss_float32(batch, reference, half.loss)
                continue
            inside = self._paths(self.reasons)
            while is_inside(path, *inside):
                if not path:
                    raise NoCureFound(
                        "Even computing the whole model in float32 is not enough. "
                        f"{fault.text} Look for a cast to half precision in the model "
                        "or in the loss function."
                    )
                path = owner_of(called - {path}, path)
            is_output = fault.cause == "forward" and path == fault.layer
            self.reasons[path] = fault.detail if is_output else fault.text

    def _give_the_loss_float32(self, batch: Batch, reference: Run, loss: float) -> None:
        """Make one of the last layers pass float32 to the loss function."""
        off = f"The loss is {loss:.4g} instead of {reference.loss:.4g}"
        paths = [value.path for value in reference.forward if value.side == "output"]
        # A tied embedding is called twice: its first output would also be float32.
        once = [p for p in reversed(paths) if p and paths.count(p) == 1]
        single = [p for p in once if not any(q != p and is_inside(q, p) for q in paths)]
        for path in [*single[:8], ""]:
            entry = f"{path}{TO}{THE_LOSS}"
            if entry in self.reasons:
                break
            half = self._run_scaled(batch, [*self.reasons, entry])
            if not self._is_lossy(half, reference, gradients=False):
                self.reasons[entry] = f"{off} in half precision"
                return
        raise NoCureFound(
            f"{off}, even if it is computed from float32 outputs. Look for a cast to "
            "half precision or a division by zero in the loss function."
        )

    def _is_lossy(self, half: Run, reference: Run, gradients: bool = True) -> bool:
        off = abs(half.loss - reference.loss)
        # Negated so that a NaN loss counts as off.
        if not off <= self._tolerance * max(abs(reference.loss), 1e-6):
            return True
        allowed = _GRADIENT_TOLERANCE * self._tolerance
        is_close = half.gradient_distance(reference) <= allowed
        return gradients and not (half.has_finite_gradients and is_close)

    def _run_scaled(self, batch: Batch, where: Sequence[str]) -> Run:
        """Run in half precision at a scale that a dynamic scaler would find."""
        scale = _MAX_SCALE
        while True:
            _logger.info("in half precision with float32 layers %s", where)
            half = run(self.setting, batch, where, scale=scale)
            overflows = math.isfinite(half.loss) and not half.has_finite_gradients
            if not overflows or scale <= _MIN_SCALE:
                return half
            scale *= 2.0**-8

    def _paths(self, where: Iterable[str]) -> list[str]:
        chains = resolve(self.setting.model, where)
        return [path for chain in chains for path, _ in chain.layers]

    def _share(self, paths: Sequence[str]) -> float:
        """Return the share of parameters that are in these modules."""
        sizes = {p: x.size for p, x in tree_flatten(self.setting.model.parameters())}
        inside = sum(size for path, size in sizes.items() if is_inside(path, *paths))
        return float(inside / max(sum(sizes.values()), 1))


def _largest(pairs: Iterable[tuple[str, float]]) -> dict[str, float]:
    found: dict[str, float] = {}
    for path, magnitude in pairs:
        found[path] = max(magnitude, found.get(path, 0.0))
    return found
