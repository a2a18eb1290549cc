"""Find the layers of a half-precision model that must compute in float32."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from ..core.backward import check_loss_fn
from ..core.forward import Casting
from ..files.text import dtype_name, power
from .faults import find_fault
from .report import FIRST_SCALE, Float32Search, Row
from .trial import Call, Progress, Run, Trial, Value, relative_distance
from .where import TO, TO_THE_LOSS, is_inside, owner_of, resolve

# The smallest and the largest loss scale to try, and the factor between two.
_SMALLEST, _LARGEST, _FACTOR = 2.0**-40, 2.0**40, 2.0**8
# If the largest scaled gradient is smaller, many others underflow below 2**-25.
_SMALL = 2.0**-8


class NoFixFound(Exception):
    """Raised if no choice of float32 layers helps; the message gives the reason."""


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

    Every batch runs forward and backward in float32 and in half precision. If a value
    between layers comes within a factor of ``margin`` of the dtype's maximum, 65504 for
    float16, the search selects all layers from the one that computes this value to the
    last one that reads it. The search also selects layers whose values are non-finite
    or too far from float32. Finally, the loss and gradients must match float32.

    The search does not change the model. Pass the result to
    :func:`mlx_gradscale.float32_layers`, or save it for later. If the search takes
    longer than three seconds, its runs are printed to stderr.

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
        trials.append(Trial(model, loss_fn, args, named, casting, name=name))
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
    state, problem = _Search(trials[0], margin), ""
    try:
        compared = []
        for trial in trials:
            reference = state.run_in_float32(trial)
            compared.append(replace(trial, reference=reference, tolerance=tolerance))
        tried = None
        while tried != list(state.reasons):
            tried = list(state.reasons)
            state.halves = [state.grow(trial) for trial in compared]
    except NoFixFound as error:
        state.reasons, problem = {}, str(error)
    return replace(state.report(problem), calibration=calibration_line(trials[0]))


def run_scaled(trial: Trial, where: Iterable[str] | None, progress: Progress) -> Run:
    """Run in half precision, at a loss scale at which the gradients fit, if any does.

    ``where`` replaces the model's float32 layers for this run; None keeps them.
    """
    layers = None if where is None else list(where)
    names = [x if x.partition(TO)[0] else f"the model{x}" for x in layers or ()]
    text = f", with {', '.join(names)} in float32" if names else ""

    def run(scale: float) -> Run:
        progress.show(f"{trial.name} in half precision at {power(scale)}{text}")
        return trial.run(layers, scale)

    half = larger = run(FIRST_SCALE)
    while not half.has_finite_gradients and math.isfinite(half.loss):
        if half.scale <= _SMALLEST:
            return half
        half = run(half.scale / _FACTOR)
    while larger.has_finite_gradients and not larger.is_loss_off:
        half = larger
        largest = max(value.largest for value in half.gradients)
        is_small = largest * half.scale < _SMALL and half.scale < _LARGEST
        if half.is_good or not is_small:
            break
        larger = run(half.scale * _FACTOR)
    return half


def calibration_line(trial: Trial, source: str = "optimizer") -> str:
    """Return the line of code that calibrates the loss scale for a trial."""
    name = getattr(trial.loss_fn, "__name__", "")
    arguments = [source, "model", name if name.isidentifier() else "loss_fn"]
    arguments += ["*batch"] if trial.args else []
    arguments += [f"{name}={name}" for name in trial.kwargs]
    dtype, keep, cast_inputs = trial.casting
    arguments += [f"compute_dtype=mx.{dtype_name(dtype)}"] if dtype else []
    arguments += ["keep=keep"] if keep else []
    arguments += [] if cast_inputs else ["cast_inputs=False"]
    return f"mlx_gradscale.diagnostics.calibrate({', '.join(arguments)})"


class _Search:
    """The state of a search: the layers found so far, and the runs of every batch."""

    def __init__(self, trial: Trial, margin: float):
        self.reasons: dict[str, str] = {}
        self.references: list[Run] = []
        self.halves: list[Run] = []
        self._model = trial.model
        self._maximum = float(mx.finfo(trial.half or mx.float16).max)
        self._margin = margin
        self._progress = Progress("Search for float32 layers")
        # Magnitudes to ignore: of the batch, and of values that training cannot change.
        self._given: set[float] = set()

    def run_in_float32(self, trial: Trial) -> Run:
        """Run a batch in float32, and select the layers that exchange large values."""
        self._progress.show(f"{trial.name} in float32")
        reference = trial.reference or trial.run_in_float32()
        fault = find_fault(trial, reference)
        if fault is None:
            self.references.append(reference)
            self._cover(reference.loss_call)
            return reference
        why = f"{trial.name} gives non-finite values even in float32. {fault.text}"
        if fault.cause not in ("batch", "parameters"):
            why += (
                f" The loss is {reference.loss}. Look for values that grow too large, "
                "a logarithm or square root of zero, a division by zero, or a cast to "
                "half precision."
            )
        raise NoFixFound(why)

    def report(self, problem: str) -> Float32Search:
        """Return the layers found, the losses and the largest value of every layer."""
        where = list(resolve(self._model, self.reasons))
        inside = self._paths(where)
        largest: dict[str, float] = {}
        for x in (x for run in self.references for x in run.forward):
            largest[x.path] = max(x.magnitude, largest.get(x.path, 0.0))
        rows = []
        for path, size in largest.items():
            overflows_inside = path in where and size <= self._maximum
            is_float32 = is_inside(path, *inside)
            rows.append(Row(path, size, is_float32, self._maximum, overflows_inside))
        losses = [(half.expected_loss, half.loss) for half in self.halves]
        reasons = {entry: self.reasons[entry] for entry in where}
        share = 1.0 - self._share(inside)
        scale = min((half.scale for half in self.halves), default=FIRST_SCALE)
        return Float32Search(where, reasons, rows, problem, losses, share, scale)

    # Large values between layers, as measured in the float32 run.

    def _cover(self, call: Call) -> None:
        """Select a call's layers that exchange values near or above the maximum."""
        if call.path is None:
            inputs = [v for c in call.children for v in c.inputs]
            self._given = {v.magnitude for v in inputs if not v.has_gradient}
        large = [c for c in call.children if self._is_large(c.inputs + c.outputs)]
        for child in call.children:
            if child not in large:
                self._cover(child)
        inside = self._paths(self.reasons)
        if all(is_inside(c.path or "", *inside) for c in large):
            return
        entry = self._chain_for(call, call.children.index(large[0]))
        largest = max(v.magnitude for c in large for v in c.inputs + c.outputs)
        above = "above" if largest > self._maximum else "close to"
        self.reasons[entry] = f"Values reach {largest:.3g}, {above} {self._maximum:g}."

    def _chain_for(self, call: Call, first: int) -> str:
        """Return the layer or shortest chain that covers the large values of a call."""
        # Example: a model calls embed, blocks.0, blocks.1, norm and head in this order.
        # If blocks.1 returns 1e5, norm reads it: "blocks.1 to norm". If the model's own
        # code multiplies the output of embed by 1e6, blocks.0 is the first to read it,
        # so the chain starts one call earlier: "embed to norm". If head returns 1e5:
        # "head to the loss". If blocks.0 itself computes 1e5 between its own layers,
        # the call is that of blocks.0, and the entry "blocks.0".
        children = call.children
        if self._is_large(children[first].inputs):
            # The caller's own code computed the value, between calls of its children.
            if call.path is not None and (self._share([call.path]) <= 0.5 or not first):
                return call.path
            first = max(first - 1, 0)
        readers = [i for i, c in enumerate(children) if self._is_large(c.inputs)]
        makers = [i for i, c in enumerate(children) if self._is_large(c.outputs)]
        last = max([*readers, *(i + 1 for i in makers)])
        if last < len(children):
            return self._name_chain(children[first : last + 1])
        if call.path:
            return call.path
        # The value reaches the loss function. If a model returns the value of its last
        # layers, only these have to compute in float32.
        calls = children[first:]
        while len(calls) == 1 and not self._is_large(calls[0].inputs):
            inner = calls[0].children
            large = [c for c in inner if self._is_large(c.inputs + c.outputs)]
            if not large or self._is_large(large[0].inputs):
                break
            calls = inner[inner.index(large[0]) :]
        return f"{self._name_chain(calls)}{TO_THE_LOSS}"

    def _name_chain(self, calls: list[Call]) -> str:
        paths = list(dict.fromkeys(call.path or "" for call in calls))
        short = TO.join(dict.fromkeys([paths[0], paths[-1]]))
        return short if self._paths([short]) == paths else TO.join(paths)

    def _is_large(self, values: list[Value]) -> bool:
        sizes = {value.magnitude for value in values} - self._given
        return any(size >= self._maximum / self._margin for size in sizes)

    # Faults inside layers, where half precision deviates from float32.

    def grow(self, trial: Trial) -> Run:
        """Select layers until this batch agrees with float32; return its last run."""
        while True:
            half = run_scaled(trial, self.reasons, self._progress)
            fault = find_fault(trial, half)
            if fault is None:
                return half
            if fault.cause == "gradients" and not fault.text:
                distance = relative_distance(half.gradients)
                raise NoFixFound(
                    "Nothing overflows, but rounding changes the gradients by "
                    f"{distance:.0%} compared with float32. Train in float32, or raise "
                    "the tolerance of find_float32_layers."
                )
            instead = f"{half.loss:.4g} instead of {half.expected_loss:.4g}"
            why = fault.text or f"The loss is {instead}."
            entry = self._entry_for(trial, half, fault.layer)
            if entry is None:
                raise NoFixFound(
                    "Even computing the whole model in float32 is not enough. "
                    f"{why} Look for a cast to half precision or a division by zero in "
                    "the model and in the loss function."
                )
            self.reasons[entry] = why

    def _entry_for(self, trial: Trial, half: Run, path: str | None) -> str | None:
        """Return the next layer or chain to compute in float32, or None."""
        # Example: the output of blocks.0.norm is wrong: "blocks.0.norm". If it is still
        # wrong in float32, the cause is around it: "blocks.0", then "" (the model). If
        # the loss function is at fault (path is None), try "head to the loss" and
        # earlier layers, until the loss is right.
        if path is not None:
            inside = self._paths(self.reasons)
            called = {"", *(value.path for value in half.forward)}
            while path and is_inside(path, *inside):
                path = owner_of(called - {path}, path)
            return None if is_inside(path, *inside) else path
        paths = [value.path for value in half.forward if value.side == "output"]
        # Skip layers called twice, such as tied embeddings: both outputs would change.
        once = [p for p in reversed(paths) if p and paths.count(p) == 1]
        single = [p for p in once if not any(q != p and is_inside(q, p) for q in paths)]
        for last in [*single[:8], ""]:
            entry = f"{last}{TO_THE_LOSS}"
            run = run_scaled(trial, [*self.reasons, entry], self._progress)
            if run.is_good or (half.is_loss_off and not run.is_loss_off):
                return entry
        return None

    def _paths(self, where: Iterable[str]) -> list[str]:
        return [p for paths in resolve(self._model, where).values() for p in paths]

    def _share(self, paths: Sequence[str]) -> float:
        """Return the share of the model's parameters inside the given modules."""
        sizes = {p: x.size for p, x in tree_flatten(self._model.parameters())}
        inside = sum(size for path, size in sizes.items() if is_inside(path, *paths))
        return float(inside / max(sum(sizes.values()), 1))
