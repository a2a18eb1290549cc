"""Find the layers of a half-precision model that must compute in float32."""

import math
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from ..core.forward import Casting
from ..core.gradients import check_loss_fn
from ..files.text import dtype_name
from .check import Check, check, find_bad, find_bad_input, is_loss_off
from .layers import float32_layers
from .report import FIRST_SCALE, Float32Search, Row
from .trace import Call, floats, magnitude, trace
from .trial import Trial, preserved
from .where import TO, TO_THE_LOSS, is_inside, resolve

# Seconds before progress is printed: shorter work ends before anyone wonders.
_DELAY = 3.0
# Errors of a layer in half precision. Rounding stays below the first, but for a choice
# between two near values, such as experts; an overflow in a sum exceeds it. The second
# applies if the loss is off but no error exceeds the first.
_FAR, _SUSPICIOUS = 0.25, 0.05
# How often layers are added for one batch, and how many layers before the loss to try.
_ROUNDS, _LAST_LAYERS = 5, 8
_LOOK = (
    "Look for values that grow too large, a logarithm or square root of zero, a "
    "division by zero, or a cast to half precision."
)
_ROOT = (
    "The derivatives of sqrt and of a norm, for example, are inf or NaN at zero, which "
    "an epsilon fixes."
)


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

    Every batch runs in float32. If a value between layers comes within a factor of
    ``margin`` of the dtype's maximum, 65504 for float16, the search selects all layers
    from the one that computes this value to the last one that reads it. If the loss in
    half precision still differs from float32, each layer also runs in half precision on
    its float32 inputs, and the layers that differ are selected. Finally, the gradients
    of the whole model must match float32.

    For each batch, this takes the time of about three training steps if no layers are
    wrong, and of at most about forty. The model must fit into memory in float32, with
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
    state, problem = _Search(trials[0], tolerance, margin), ""
    try:
        losses = [state.cover(trial) for trial in trials]
        for trial, expected in zip(trials, losses, strict=True):
            state.fix_loss(trial, expected)
        for trial in trials:
            state.check_gradients(trial)
    except NoFixFound as error:
        state.reasons, problem = {}, str(error)
    return state.report(problem)


def find_wrong(call: Call, error: float) -> list[Call]:
    """Return the innermost calls whose error in half precision is this large."""
    inside = [x for child in call.children for x in find_wrong(child, error)]
    return inside or ([call] if call.error >= error else [])


class _Search:
    """The state of a search: the layers found so far, and the largest values."""

    def __init__(self, trial: Trial, tolerance: float, margin: float):
        self.reasons: dict[str, str] = {}
        self._checks: list[Check] = []
        self._model, self._tolerance = trial.model, tolerance
        self._half = trial.half or mx.float16
        self._maximum = float(mx.finfo(self._half).max)
        self._large = self._maximum / margin
        self._largest: dict[str, float] = {}
        self._count, self._start = 0, time.monotonic()

    def _show(self, run: str) -> None:
        self._count += 1
        if sys.stderr.isatty() and time.monotonic() - self._start >= _DELAY:
            text = f"Search for float32 layers, run {self._count}: {run}"
            print(text, file=sys.stderr, flush=True)

    def _loss(self, trial: Trial, where: Iterable[str]) -> float:
        """Return the loss in half precision with these float32 layers."""
        self._show(f"{trial.name} in half precision")
        with preserved(self._model):
            float32_layers(self._model, list(where))
            return float(trial.differentiate()[0])

    def report(self, problem: str) -> Float32Search:
        """Return the layers found, the losses and the largest value of every layer."""
        where = list(resolve(self._model, self.reasons))
        inside = self._paths(where)
        rows = [
            Row(path, size, is_inside(path, *inside), self._maximum)
            for path, size in self._largest.items()
        ]
        losses = [(found.expected_loss, found.loss) for found in self._checks]
        reasons = {entry: self.reasons[entry] for entry in where}
        share = 1.0 - self._share(inside)
        scale = min((found.scale for found in self._checks), default=FIRST_SCALE)
        return Float32Search(where, reasons, rows, problem, losses, share, scale)

    def _paths(self, where: Iterable[str]) -> list[str]:
        return [p for paths in resolve(self._model, where).values() for p in paths]

    def _share(self, paths: Sequence[str]) -> float:
        """Return the share of the model's parameters inside the given modules."""
        sizes = {p: x.size for p, x in tree_flatten(self._model.parameters())}
        inside = sum(size for path, size in sizes.items() if is_inside(path, *paths))
        return float(inside / max(sum(sizes.values()), 1))

    # Large values between layers, as measured in the float32 run.

    def cover(self, trial: Trial) -> float:
        """Select the layers that exchange large values; return the loss in float32."""
        self._show(f"{trial.name} in float32")
        with trial.in_float32() as exact:
            call, loss = trace(exact)
        if not math.isfinite(loss):
            *_, text = find_bad_input(trial)
            bad = (x.path for x in call.walk() if x.largest_output == math.inf)
            if not text and (path := next(bad, None)) is not None:
                text = f"The output of {path or 'the model'} is the first. {_LOOK}"
            text = text or f"The loss is {loss}. {_LOOK}"
            raise NoFixFound(
                f"{trial.name} gives non-finite values even in float32. {text}"
            )
        for x in call.walk():
            if x.path is not None:
                largest = self._largest.get(x.path, 0.0)
                self._largest[x.path] = max(x.largest, largest)
        # The batch itself can be large, but training does not change it.
        batch = floats((trial.args, trial.kwargs))
        self._given = {float(magnitude([x])) for x in batch}
        self._cover(call)
        return loss

    def _is_large(self, size: float) -> bool:
        return size >= self._large and size not in self._given

    def _cover(self, call: Call) -> None:
        """Select a call's layers that exchange values near or above the maximum."""
        # Example: a model calls embed, blocks.0, blocks.1, norm and head in this order.
        # If blocks.1 returns 1e5, norm reads it: "blocks.1 to norm". If the model's own
        # code multiplies the output of embed by 1e6, blocks.0 is the first to read it,
        # so the chain starts one call earlier: "embed to norm". If head returns 1e5:
        # "head to the loss". If blocks.0 itself computes 1e5 between its own layers,
        # the call is that of blocks.0, and the entry "blocks.0".
        children = call.children
        reads = [self._is_large(x.largest_input) for x in children]
        makes = [self._is_large(x.largest_output) for x in children]
        large = [i for i in range(len(children)) if reads[i] or makes[i]]
        for i, child in enumerate(children):
            if i not in large:
                self._cover(child)
        inside = self._paths(self.reasons)
        if all(is_inside(children[i].path or "", *inside) for i in large):
            return
        first, last = large[0], large[-1] + makes[large[-1]]
        is_whole = last == len(children)
        if reads[first]:
            # The caller's own code computes the value, after its previous child.
            is_whole |= not first or self._share([call.path or ""]) <= 0.5
            first = max(first - 1, 0)
        chain = self._chain(children[first:], last - first)
        entry = call.path if call.path and is_whole else chain
        largest = max(children[i].largest for i in large)
        above = "above" if largest > self._maximum else "close to"
        self.reasons[entry] = f"Values reach {largest:.3g}, {above} {self._maximum:g}."

    def _chain(self, calls: list[Call], last: int) -> str:
        """Name the chain from the first of some calls to the last, or to the loss."""
        end = TO_THE_LOSS if last == len(calls) else ""
        calls = calls[: last + 1]
        # If the model returns the large value of its last layers, only these have to
        # compute in float32.
        while end and len(calls) == 1 and not self._is_large(calls[0].largest_input):
            inner = calls[0].children
            large = [i for i, x in enumerate(inner) if self._is_large(x.largest_output)]
            if not large or self._is_large(inner[large[0]].largest_input):
                break
            calls = inner[large[0] :]
        paths = list(dict.fromkeys(x.path or "" for x in calls))
        short = TO.join(dict.fromkeys([paths[0], paths[-1]]))
        return (short if self._paths([short]) == paths else TO.join(paths)) + end

    # Layers that are wrong in half precision.

    def fix_loss(self, trial: Trial, expected: float) -> None:
        """Select layers until the loss of this batch agrees with float32."""
        for _ in range(_ROUNDS):
            loss = self._loss(trial, self.reasons)
            if not is_loss_off(loss, expected, self._tolerance):
                return
            self._show(f"{trial.name} in float32, and each layer in half precision")
            with preserved(self._model):
                float32_layers(self._model, list(self.reasons))
                with trial.in_float32() as exact:
                    call, _ = trace(exact, self._half)
            found = find_wrong(call, _FAR) or find_wrong(call, _SUSPICIOUS)
            why = {x.path or "": self._describe(x) for x in found}
            if not why and (last := self._find_last_layer(trial, call, expected)):
                why = {last: f"The loss is {loss:.4g} instead of {expected:.4g}."}
            if not why.keys() - self.reasons.keys():
                break
            self.reasons |= why
        raise NoFixFound(
            "Even computing the whole model in float32 is not enough. The loss is "
            f"{loss:.4g} instead of {expected:.4g}. {_LOOK}"
        )

    def _describe(self, call: Call) -> str:
        name, size = call.path or "the model", call.largest_input
        if size > self._maximum:
            return f"The input of {name} reaches {size:.3g}, above {self._maximum:g}."
        what = f"off by up to {min(call.error, 9.99):.0%}"
        what = what if call.error < math.inf else "non-finite"
        return f"The output of {name} is {what} in {dtype_name(self._half)}."

    def _find_last_layer(self, trial: Trial, call: Call, expected: float) -> str | None:
        """Return the chain to the loss that is needed if the loss function is wrong."""
        paths = [x.path for x in call.walk() if x.path and not x.children]
        # Skip layers called twice, such as tied embeddings: both outputs would change.
        once = [path for path in reversed(paths) if paths.count(path) == 1]
        for last in [*once[:_LAST_LAYERS], ""]:
            entry = f"{last}{TO_THE_LOSS}"
            loss = self._loss(trial, [*self.reasons, entry])
            if not is_loss_off(loss, expected, self._tolerance):
                return entry
        return None

    def check_gradients(self, trial: Trial) -> None:
        """Check the gradients of this batch at a scale at which they fit."""
        self._show(f"{trial.name} forward and backward")
        scales = FIRST_SCALE, None
        found = check(trial, list(self.reasons), scales, self._tolerance)
        self._checks.append(found)
        if found.is_good:
            return
        with trial.in_float32() as exact:
            bad = find_bad(exact.differentiate()[1])
        if bad or found.bad_gradients:
            where = "even in float32" if bad else "at every loss scale"
            text = f"{trial.name} gives non-finite gradients {where}."
            raise NoFixFound(f"{text} {_ROOT}")
        raise NoFixFound(
            "Nothing overflows, but rounding or underflow changes the gradients by "
            f"{found.distance:.0%} compared with float32. Train in float32, or raise "
            "the tolerance of find_float32_layers."
        )
