"""Find the fewest layers that must be float32 for a model to train in float16."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from ..islands.where import THE_LOSS, Entry, find_members, is_inside, ordered_modules
from ..masters import HALF
from .calls import Call, call_tree, is_one_of, reach
from .checks import (
    NoSetHelps,
    check_arguments,
    check_parameters,
    check_reference,
    checked_batches,
)
from .faults import caller_of, first_bad, largest_jump, worst_gradient
from .measure import Batch, Run, Setting, Value, edge_dtypes, run
from .progress import Progress
from .report import LARGEST, Float32Search, Reason, make_report

# More than rounding makes of a value from one layer to the next, less than what is
# left of a sum that overflowed.
_FAR = 0.25
# Gradients are rounded more often than the loss: in both passes.
_GRADIENTS = 10
_LARGEST_SCALE, _SMALLEST_SCALE = 2.0**16, 2.0**-40
_MOST_RUNS = 200


def find_float32_layers(
    model: nn.Module,
    loss_fn: Callable[..., Any],
    batches: Iterable[Any],
    *,
    compute_dtype: mx.Dtype | None = None,
    cast_inputs: bool = True,
    margin: float = 2.0,
    tolerance: float = 0.02,
    progress: bool | None = None,
) -> Float32Search:
    """Find which layers must compute in float32, and check that they suffice.

    Runs every batch in float32 and in half precision, forward and backward. Where a
    value between layers comes within ``margin`` of 65504, those that make it and those
    that take it are put in an island; where a layer's output is not finite or far from
    that of float32, the layer is. Then loss and gradients have to agree with float32.

    The model is the same afterwards: hand what is returned to
    :func:`mlx_gradscale.float32_layers`, or save it for later.

    Args:
        model (nn.Module): The model, in half precision or to be run with
            ``compute_dtype``.
        loss_fn (Callable): As for ``nn.value_and_grad``; the plain one, not that of
            ``scale_loss``.
        batches (Iterable): Each is the arguments of ``loss_fn``: a tuple, a dict of
            keywords, or the only one. A few that are typical suffice.
        compute_dtype (Dtype, optional): As for ``GradScaler.value_and_grad``.
        cast_inputs (bool): As for ``GradScaler.value_and_grad``.
        margin (float): How many times larger values may become in training before
            they overflow. Default: ``2.0``.
        tolerance (float): How far the loss may be from that of float32, as a share of
            it. All gradients together may be ten times as far. Default: ``0.02``.
        progress (bool, optional): Show what it does. Default: on a terminal.

    Returns:
        Float32Search: The layers, why each is among them, and how large the values of
        every layer are. If no set helps, it says so.

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
    checked = checked_batches(model, loss_fn, batches, compute_dtype, margin, tolerance)
    setting = Setting(model, loss_fn, compute_dtype, cast_inputs)
    return search_batches(setting, checked, margin, tolerance, progress)


def search_batches(
    setting: Setting,
    batches: Sequence[Batch],
    margin: float,
    tolerance: float,
    progress: bool | None = False,
) -> Float32Search:
    """Search as :func:`find_float32_layers` does, with what was checked before."""
    with Progress(progress) as shown:
        search = Search(setting, margin, tolerance, shown)
        try:
            check_parameters(setting)
            for i, batch in enumerate(batches):
                shown.batch(i + 1, len(batches))
                search.add(batch, f"batch {i + 1}")
            search.finish()
        except NoSetHelps as error:
            found: list[Reason] = []
            return make_report(
                setting, search.references, found, search.halves, str(error)
            )
        return make_report(setting, search.references, search.reasons, search.halves)


class Search:
    """The islands so far, and the batches that they were tried with."""

    def __init__(
        self, setting: Setting, margin: float, tolerance: float, shown: Progress
    ):
        self.setting = setting
        self.limit = LARGEST / margin
        self.tolerance = tolerance
        self.reasons: list[Reason] = []
        self.batches: list[Batch] = []
        self.references: list[Run] = []
        self.halves: list[Run] = []
        self._shown = shown
        self._runs = 0
        self._rounding = math.inf
        self._given: list[float] = []
        self._sizes: dict[str, int] = {
            path: sum(x.size for _, x in tree_flatten(module.parameters()))
            for path, module in ordered_modules(setting.model)
        }

    @property
    def where(self) -> list[Entry]:
        """The layers that were found, without those inside others."""
        return _outermost(self.setting.model, self.reasons)

    def add(self, batch: Batch, name: str) -> None:
        """Run a batch in float32, and grow islands until half precision agrees."""
        check_arguments(self.setting, batch, name)
        reference = self._run(batch, float32=True)
        check_reference(reference, name)
        self.batches.append(batch)
        self.references.append(reference)
        calls = call_tree(reference)
        # What the loss function hands in is in half precision already, and stays.
        self._given = [reach(v) for call in calls.children for v in call.inputs]
        self._cover_large_values(batch, calls)
        self.halves.append(self._grow(batch, reference))

    def finish(self) -> None:
        """Try every batch with all islands: one may have been added later."""
        for _ in range(3):
            before = self.where
            for i, batch in enumerate(self.batches):
                self.halves[i] = self._grow(batch, self.references[i])
            if self.where == before:
                break
        self._leave_out_what_is_not_needed()

    def _leave_out_what_is_not_needed(self) -> None:
        """Try without each layer but the last, which was needed with all others."""
        for reason in [r for r in self.reasons[:-1] if not r.by_size]:
            others = [each for each in self.reasons if each is not reason]
            where = _outermost(self.setting.model, others)
            halves = []
            for batch, reference in zip(self.batches, self.references, strict=True):
                half = self._run_scaled(batch, reference, where)
                if self._is_lossy(half, reference):
                    break
                halves.append(half)
            else:
                self.reasons, self.halves = others, halves

    # The edges of layers, where float32 says how large values are.

    def _cover_large_values(self, batch: Batch, call: Call) -> None:
        large = [self._is_large(c.inputs + c.outputs) for c in call.children]
        for child, is_large in zip(call.children, large, strict=True):
            if not is_large:
                self._cover_large_values(batch, child)
        if any(large) and not self._is_covered(call, large):
            entry, maker = self._island_for(batch, call, large.index(True))
            edges = [v for child in call.children for v in child.inputs + child.outputs]
            largest = max(reach(value) for value in edges)
            self._put(entry, maker, self._how_large(largest), by_size=True)

    def _is_covered(self, call: Call, large: list[bool]) -> bool:
        inside = self._inside(self.where)
        needed = [
            c.module
            for c, is_large in zip(call.children, large, strict=True)
            if is_large
        ]
        return all(any(is_inside(p, i) for i in inside) for p in needed)

    def _island_for(
        self, batch: Batch, call: Call, first: int
    ) -> tuple[Entry, str | None]:
        """Return the smallest island that holds the large values of one call."""
        children = call.children
        made_before = self._is_large(children[first].inputs)
        maker = call.path if made_before else children[first].path
        if made_before and call.path is not None:
            if self._share(call.path) <= 0.5 or first == 0:
                return call.path, maker
            first -= 1
        takers = [i for i, c in enumerate(children) if self._is_large(c.inputs)]
        makers = [i for i, c in enumerate(children) if self._is_large(c.outputs)]
        last = max([*takers, *(i + 1 for i in makers)])
        for end in range(last, len(children)):
            entry = self._named([c.module for c in children[first : end + 1]])
            if not self._leaks(batch, entry):
                return entry, maker
        if call.path:
            return call.path, maker
        # It goes through the whole model: the loss function gets it, too.
        return [*dict.fromkeys(c.module for c in children[first:]), THE_LOSS], maker

    def _is_large(self, values: list[Value]) -> bool:
        reached = [reach(value) for value in values]
        return any(x >= self.limit and not is_one_of(x, self._given) for x in reached)

    def _how_large(self, largest: float) -> str:
        if largest > LARGEST:
            return f"values of {largest:.3g}, above 65504"
        return f"values of {largest:.3g}, within {LARGEST / self.limit:g}x of 65504"

    def _named(self, paths: Sequence[str]) -> Entry:
        """Return an entry for modules that are called in this order."""
        paths = list(dict.fromkeys(paths))
        if len(paths) == 1:
            return paths[0]
        entry = f"{paths[0]} to {paths[-1]}"
        try:
            (members,) = find_members(self.setting.model, entry)
        except ValueError:
            return paths
        return entry if [path for path, _ in members.modules] == paths else paths

    def _leaks(self, batch: Batch, entry: Entry) -> bool:
        """Tell whether float32 gets out of an island to layers that follow."""
        plain = edge_dtypes(self.setting, batch, [])
        inside = self._inside([entry])
        for (key, before), (_, after) in zip(
            plain, edge_dtypes(self.setting, batch, [entry]), strict=True
        ):
            outside = not any(is_inside(key, island) for island in inside)
            if outside and before in HALF and after not in HALF:
                return True
        return False

    # What goes wrong between those edges, seen where half precision leaves float32.

    def _grow(self, batch: Batch, reference: Run) -> Run:
        while True:
            half = self._run_scaled(batch, reference)
            place = self._first_fault(half, reference)
            if place is None:
                return half
            path, why = place
            if path is None:
                self._give_the_loss_float32(batch, reference, why)
                continue
            inside = self._inside(self.where)
            while any(is_inside(path, island) for island in inside):
                if not path:
                    raise NoSetHelps(
                        f"With the whole model in float32: {why}. Look at the loss "
                        "function: it, or the model, casts to half precision itself."
                    )
                path = caller_of(reference, path)
            self._put(path, path, why)

    def _first_fault(self, half: Run, ref: Run) -> tuple[str | None, str] | None:
        if not self._is_lossy(half, ref):
            return None
        if self._is_lossy(half, ref, gradients=False):
            place = first_bad(half.forward, ref.forward, "output", _FAR)
            place = place or largest_jump(half.forward, ref.forward, "output")
            return place or (None, f"the loss is {half.loss:.4g}, not {ref.loss:.4g}")
        distance = half.gradient_distance(ref)
        allowed = _GRADIENTS * self.tolerance
        place = first_bad(half.forward, ref.forward, "output", _FAR)
        place = place or first_bad(half.backward, ref.backward, "input", _FAR)
        if not place:
            if distance > 0.8 * self._rounding:
                raise NoSetHelps(
                    f"Nothing overflows, but rounding takes gradients {distance:.0%} "
                    f"away from those of float32, and {allowed:.0%} are allowed: pass "
                    f"tolerance={distance / _GRADIENTS * 1.5:.2g} if that will do."
                )
            self._rounding = distance
        path, why = place or worst_gradient(half, ref)
        return path, f"{why}, in the backward pass at a loss scale of {half.scale:g}"

    def _give_the_loss_float32(self, batch: Batch, reference: Run, why: str) -> None:
        """Let the last layers hand float32 to the loss function."""
        paths = [v.event.path for v in reference.forward if v.event.side == "output"]
        # A tied embedding is called twice: its first output would be float32, too.
        once = [p for p in reversed(paths) if p and paths.count(p) == 1]
        leaves = [p for p in once if not any(q != p and is_inside(q, p) for q in paths)]
        for path in [*leaves[:8], ""]:
            entry = [path, THE_LOSS]
            if any(reason.entry == entry for reason in self.reasons):
                break
            where = [*self.where, entry]
            half = self._run_scaled(batch, reference, where)
            if not self._is_lossy(half, reference, gradients=False):
                self._put(entry, path, f"{why} in half precision")
                return
        raise NoSetHelps(
            f"{why}, also if it is computed from float32: look at the loss function, "
            "which casts to half precision itself or divides by zero."
        )

    def _is_lossy(self, half: Run, reference: Run, gradients: bool = True) -> bool:
        off = abs(half.loss - reference.loss)
        # Not the other way round, for a loss that is NaN.
        if not off <= self.tolerance * max(abs(reference.loss), 1e-6):
            return True
        distance = half.gradient_distance(reference)
        allowed = _GRADIENTS * self.tolerance
        return gradients and not (half.gradients_are_finite() and distance <= allowed)

    def _run_scaled(
        self, batch: Batch, reference: Run, where: Sequence[Entry] | None = None
    ) -> Run:
        """Run in half precision, at the scale that a dynamic scaler would find."""
        where = self.where if where is None else where
        inside = self._inside(where)
        outside = [
            value
            for value in [*reference.backward, *reference.gradients.values()]
            if not any(is_inside(value.event.path, island) for island in inside)
        ]
        largest = max((value.largest for value in outside), default=0.0)
        power = math.floor(math.log2(self.limit / largest)) if largest > 0 else 16
        scale = min(max(2.0**power, _SMALLEST_SCALE), _LARGEST_SCALE)
        while True:
            half = self._run(batch, where, scale=scale)
            bad = math.isfinite(half.loss) and not half.gradients_are_finite()
            if not bad or scale <= _SMALLEST_SCALE:
                return half
            scale = max(scale * 2.0**-8, _SMALLEST_SCALE)

    # Bookkeeping.

    def _run(self, batch: Batch, where: Sequence[Entry] = (), **options: Any) -> Run:
        self._runs += 1
        if self._runs > _MOST_RUNS * max(len(self.batches), 1):
            raise NoSetHelps(f"The search did not end in {self._runs} runs.")
        self._shown.run(self._runs, len(self.reasons))
        return run(self.setting, batch, where, **options)

    def _put(
        self, entry: Entry, maker: str | None, why: str, by_size: bool = False
    ) -> None:
        self.reasons.append(Reason(entry, maker, why, by_size))

    def _inside(self, where: Sequence[Entry]) -> list[str]:
        found = find_members(self.setting.model, list(where))
        return [path for members in found for path, _ in members.modules]

    def _share(self, path: str) -> float:
        return self._sizes[path] / max(self._sizes[""], 1)


def _outermost(model: nn.Module, reasons: Sequence[Reason]) -> list[Entry]:
    """Return the entries of reasons, without those that lie in others."""
    found = find_members(model, [reason.entry for reason in reasons])
    return [members.name for members in found]
