"""``GradScaler``: PyTorch's loss scaler for MLX, without host syncs."""

import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from copy import deepcopy
from functools import reduce
from itertools import repeat
from operator import attrgetter
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx.optimizers import Optimizer
from mlx.utils import tree_map

from . import scale as rule
from .finite import all_finite_times, arrays
from .forward import Casting
from .fusion import root_of
from .gradients import Backward, check_loss_fn, unscale, unscale_in_place
from .guard import Participant, inspect, plan
from .masters import HALF
from .notices import SkipWatch
from .optimizers import check_supported, initialize, is_wrapper, needs_init
from .ranks import Ranks
from .trees import FLOATING, Leaf, Writes, commit, match, read, tree_of

_START_AFRESH = (
    "To discard an interrupted iteration, call scaler.update(scaler.get_scale())."
)
_UNSCALED = "value_and_grad() or scale_loss()"
_SCALED = "scale()"


class _Stage(NamedTuple):
    """The progress of one optimizer since the last ``update()``."""

    optimizer: Optimizer  # referenced to keep its id unique
    ranks: Ranks
    # Whether the gradients passed to unscale_() were finite; None after step().
    finite: mx.array | None


class _Scaled(NamedTuple):
    """The scale that :meth:`GradScaler.scale` has multiplied by in this iteration.

    If wrappers share a scaler, the ``update()`` of one may change the scale before
    another one steps with gradients that have the old scale.
    """

    by: mx.array | None = None
    # The scale after those updates. If the state has another array, a load or
    # mx.compile has replaced it, and gradients have the present scale.
    now: mx.array | None = None
    # The ids of the optimizers that have updated. Their next gradients belong to the
    # next iteration, even if mx.compile does not call scale() again.
    updated: frozenset[int] = frozenset()


class _State(dict[str, mx.array]):
    """The state of a scaler, and how far the current iteration has got."""

    def __init__(self) -> None:
        super().__init__()
        # By the id of the optimizer. compile_step() restores it after an error.
        self.stages: dict[int, _Stage] = {}


class GradScaler:
    """Scale the loss to keep float16 gradients in range, and skip steps that overflow.

    The scale, counters and settings are stored in :attr:`state`, a dict of 0-d arrays.
    Pass it to ``mx.compile`` to compile the whole training step, including the decision
    whether to skip it.

    There are two modes, and the first call selects one. With :meth:`value_and_grad` or
    :meth:`scale_loss`, you get unscaled float32 gradients, which your code can clip,
    accumulate, average or log. :meth:`scale` is PyTorch's mode: gradients stay scaled
    until :meth:`unscale_` or :meth:`step`.

    Args:
        init_scale (float): The initial loss scale. Default: ``65536.0``.
        growth_factor (float): Multiplies the scale after ``growth_interval`` finite
            steps in a row. Default: ``2.0``.
        backoff_factor (float): Multiplies the scale when it backs off, by default after
            every overflow. Default: ``0.5``.
        growth_interval (int): The number of consecutive finite steps after which the
            scale grows. Default: ``2000``.
        enabled (bool): If false, nothing is scaled and no step is skipped, even if a
            gradient is NaN. Default: ``True``.
        backoff_interval (int): The number of consecutive overflows after which the
            scale backs off, as in Paddle. Cannot be combined with ``hysteresis``.
            Default: ``1``.
        hysteresis (int): The scale backs off only after this many overflows,
            consecutive or not, as in Megatron and DeepSpeed. The count restarts after
            ``growth_interval`` finite steps in a row. Default: ``1``.
        dynamic (bool): If false, the scale is constant; overflowing steps are still
            skipped. Default: ``True``.
        min_scale (float): The smallest scale. Default: ``2**-64``.
        max_scale (float): The largest scale. Default: ``2**64``.
        group (mx.distributed.Group, optional): The ranks that skip steps together: an
            overflow on one of them skips the step on all. Required for sharded
            gradients. Averaged gradients do not need it, because they are equal on all
            ranks. Default: ``None``.

    Example:
        >>> import mlx.core as mx, mlx.nn as nn, mlx.optimizers as optim
        >>> from mlx_gradscale import GradScaler
        >>> model, optimizer = nn.Linear(4, 1), optim.AdamW(1e-3)
        >>> scaler = GradScaler(init_scale=1024.0)
        >>> def loss_fn(x, y):
        ...     return nn.losses.mse_loss(model(x).astype(mx.float32), y)
        >>> loss_and_grad = scaler.value_and_grad(model, loss_fn, mx.float16)
        >>> loss, grads = loss_and_grad(mx.ones((2, 4)), mx.zeros((2, 1)))
        >>> scaler.minimize(optimizer, model, grads)
        array(True, dtype=bool)
        >>> scaler.get_scale()
        1024.0
    """

    def __init__(
        self,
        init_scale: float = 65536.0,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        *,
        backoff_interval: int = 1,
        hysteresis: int = 1,
        dynamic: bool = True,
        min_scale: float = rule.SMALLEST_SCALE,
        max_scale: float = rule.LARGEST_SCALE,
        group: mx.distributed.Group | None = None,
    ):
        if isinstance(init_scale, str):
            text = f"init_scale must be a number, got {init_scale!r}. Unlike PyTorch's"
            raise TypeError(f"{text}, this GradScaler has no device argument.")
        values = {
            "scale": init_scale,
            "growth_factor": growth_factor,
            "backoff_factor": backoff_factor,
            "growth_interval": growth_interval,
            "backoff_interval": backoff_interval,
            "hysteresis": hysteresis,
            "dynamic": dynamic,
            "min_scale": min_scale,
            "max_scale": max_scale,
        }
        rule.check(values, "init_scale")
        self._enabled = bool(enabled)
        self._ranks = Ranks(group)
        self._mode: str | None = None
        self._state = _State()
        self._stages = self._state.stages
        self._backward = Backward(self._state, self._enabled)
        self._skip_watch = SkipWatch()
        self._scaled = _Scaled()
        self._replace(rule.as_arrays(rule.DEFAULTS | values))

    def _replace(self, fields: dict[str, mx.array]) -> None:
        """Replace the arrays of the state, unless the scaler is disabled."""
        if not self._enabled and self._state:
            return
        commit((self._state, name, x) for name, x in fields.items())
        with suppress(RuntimeError, ValueError):  # inside mx.compile
            # Evaluate now, because MLX cannot evaluate a lazy array in another thread.
            mx.eval(self._state)
        # Inside mx.compile, nothing is known but that the scale may change.
        is_dynamic = self._enabled and read(self._state["dynamic"]) is not False
        self._backward.is_dynamic = is_dynamic
        # Whether to warn about float16 gradients that were not scaled.
        self._expects_scaling = is_dynamic or read(self._state["scale"]) != 1

    @property
    def state(self) -> dict[str, mx.array]:
        """The dict of arrays to pass to ``mx.compile`` as both inputs and outputs."""
        return self._state

    @property
    def group(self) -> mx.distributed.Group | None:
        """The ranks that skip steps together, or None if each rank decides alone."""
        return self._ranks.group

    def value_and_grad(
        self,
        model: nn.Module,
        loss_fn: Callable[..., Any],
        compute_dtype: mx.Dtype | None = None,
        *,
        keep: Callable[[str, mx.array], bool] | None = None,
        cast_inputs: bool = True,
    ) -> Callable[..., Any]:
        """Like ``nn.value_and_grad``, but scale the loss for the backward pass.

        The returned function returns the unscaled output of ``loss_fn`` and unscaled
        float32 gradients. Gradients are lazy: if you pass them unmodified to
        :meth:`step`, a GPU needs no float32 copy. Values that overflow become NaN,
        which survives clipping, accumulation and averaging.

        Args:
            model (nn.Module): The model to differentiate.
            loss_fn (Callable): Returns a scalar loss, or a tuple whose first element is
                the loss.
            compute_dtype (Dtype, optional): Cast floating-point trainable parameters,
                and what the loss passes to the model or one of its modules, to this
                dtype for the forward pass. Targets are not cast, and the model keeps
                its own arrays. The loss is float32. Default: ``None``.
            keep (Callable, optional): A function of path and parameter that returns
                True to leave the parameter in its own dtype. MLX then promotes
                everything computed from it. To cast the output of a layer back, use
                ``float32_layers`` instead. Default: ``None``.
            cast_inputs (bool): If false, do not cast what enters the model, such as an
                input of 1e5, which is inf in float16. Default: ``True``.

        Example:
            >>> import mlx.core as mx, mlx.nn as nn
            >>> from mlx_gradscale import GradScaler
            >>> model = nn.Linear(2, 1)
            >>> fn = GradScaler(init_scale=1024.0).value_and_grad(
            ...     model, lambda x: model(x).astype(mx.float32).mean(), mx.float16
            ... )
            >>> loss, grads = fn(mx.ones((4, 2)))
            >>> grads["bias"], model.weight.dtype
            (array([1], dtype=float32), mlx.core.float32)
        """
        _check_model(model, "mx.value_and_grad with scale_loss()")
        casting = Casting(compute_dtype, keep, cast_inputs)
        casting.check()
        check_loss_fn(loss_fn)
        if self._enabled:
            self._set_mode(_UNSCALED)
        elif compute_dtype is None:
            plain: Callable[..., Any] = nn.value_and_grad(model, loss_fn)
            return plain
        return self._backward.value_and_grad(model, loss_fn, casting)

    def scale_loss(
        self,
        loss_fn: Callable[..., Any],
        model: Any = None,
        compute_dtype: mx.Dtype | None = None,
    ) -> Callable[..., Any]:
        """Wrap ``loss_fn`` for a trainer that does its own differentiation.

        The value of the loss does not change. Its gradients with respect to the models
        and arrays that the function is given are unscaled and in float32. Everything
        else, such as a model that only the function itself knows, has MLX's ordinary
        gradient.

        Only the returned loss can be differentiated, and only once: other outputs,
        arrays that the loss stores in a model, and second derivatives raise a
        ``RuntimeError`` where a gradient with respect to them is taken. What the loss
        leaves elsewhere, such as in a tuple or a global list, has no gradient.

        If you compute half-precision features outside the function, pass them as
        ``features.astype(mx.float32)``: their gradient is float32, and on Apple GPUs,
        the backward passes of ``mx.fast`` operations read it in their own dtype.

        Args:
            loss_fn (Callable): Returns a scalar loss, or a tuple whose first element is
                the loss.
            model (nn.Module, optional): The model to differentiate, or a tree of
                models. Default: ``None``; models among the arguments are always found.
            compute_dtype (Dtype, optional): As in :meth:`value_and_grad`, for trainers
                of float32 parameters. Default: ``None``.

        Example:
            >>> import mlx.core as mx
            >>> from mlx_gradscale import GradScaler
            >>> square = GradScaler(init_scale=8.0).scale_loss(lambda x: x * x)
            >>> mx.value_and_grad(square)(mx.array(3.0))
            (array(9, dtype=float32), array(6, dtype=float32))
        """
        casting = Casting(compute_dtype)
        casting.check()
        check_loss_fn(loss_fn)
        if self._enabled:
            self._set_mode(_UNSCALED)
        elif compute_dtype is None:
            return loss_fn
        return self._backward.scale_loss(loss_fn, model, casting)

    def scale(self, outputs: Any) -> Any:
        """Multiply each array of a tree, usually the loss, by the scale in float32.

        This selects PyTorch's mode. Call it inside the differentiated function;
        gradients then stay scaled until :meth:`unscale_` or :meth:`step`.

        Example:
            >>> import mlx.core as mx
            >>> from mlx_gradscale import GradScaler
            >>> GradScaler(init_scale=8.0).scale({"loss": mx.array(0.5)})
            {'loss': array(4, dtype=float32)}
        """
        if not self._enabled:
            return outputs
        arrays(outputs)
        self._set_mode(_SCALED)
        self._scaled = _Scaled(by=self._state["scale"], now=self._state["scale"])
        return tree_map(self._backward.scaled, outputs)

    def _inverse(self, optimizer: Optimizer) -> mx.array:
        """Return 1 / scale, for the scale of the gradients that an optimizer gets."""
        by, now, updated = self._scaled
        present = self._state["scale"]
        if by is None or now is not present or id(optimizer) in updated:
            by = present
        return 1.0 / by

    def _set_mode(self, mode: str) -> None:
        if self._mode not in (None, mode):
            raise RuntimeError(
                f"This scaler was already used with {self._mode}, so {mode} would mix "
                "scaled and unscaled gradients. With value_and_grad() and "
                "scale_loss(), return the loss without calling scale(). If you need "
                "both, create a second GradScaler."
            )
        self._mode = mode

    def unscale_(self, optimizer: Optimizer, grads: Any) -> Any:
        """Unscale the gradients in place, in float32, and return them.

        Use it to clip or inspect gradients before :meth:`step`, which is skipped if one
        of them is non-finite here, even if it is clipped afterwards. Gradients from
        :meth:`value_and_grad` are already unscaled and do not change. A single array,
        or a tree with tuples, is not modified; use the returned gradients.

        Args:
            optimizer (Optimizer): The optimizer that will step with these gradients.
                It is not modified.
            grads (Any): The gradients to unscale.

        Example:
            >>> import mlx.core as mx, mlx.optimizers as optim
            >>> from mlx_gradscale import GradScaler
            >>> scaler, optimizer = GradScaler(init_scale=8.0), optim.SGD(0.1)
            >>> loss_fn = lambda weights: scaler.scale(0.5 * weights["w"])
            >>> grads = mx.grad(loss_fn)({"w": mx.array(1.0)})
            >>> scaler.unscale_(optimizer, grads) is grads, grads
            (True, {'w': array(0.5, dtype=float32)})
        """
        if not self._enabled:
            return grads
        participant = self._participant(optimizer)
        if isinstance(grads, nn.Module):
            raise TypeError(
                "The second argument of unscale_() must be the gradients, got a model."
            )
        stage = self._stages.get(id(optimizer))
        is_stepped = stage is not None and stage.finite is None
        is_scaled = self._mode == _SCALED
        if is_stepped or (stage and is_scaled):
            when = "after step()" if is_stepped else "twice"
            raise RuntimeError(
                f"unscale_() was called {when} for this optimizer since the last "
                "update(). Call unscale_(), step() and update() once, in this order. "
                f"{_START_AFRESH}"
            )
        inverse = self._inverse(optimizer) if is_scaled else None
        finite = all_finite_times(arrays(grads), inverse, [])
        if stage is not None and stage.finite is not None:
            finite = finite & stage.finite
        self._stages[id(optimizer)] = _Stage(optimizer, participant.ranks, finite)
        return grads if inverse is None else unscale_in_place(grads, inverse)

    def step(self, optimizer: Optimizer, model: nn.Module, grads: Any) -> mx.array:
        """Update the model and optimizer, or skip the step if a gradient is non-finite.

        Several optimizers can share a scaler: call this for each of them, and then
        :meth:`update` once.

        Args:
            optimizer (Optimizer): A ``LossScaleOptimizer`` created with this scaler, an
                optimizer from ``mlx.optimizers``, or a third-party ``Optimizer`` that
                does not override ``update``.
            model (nn.Module): The model to update.
            grads (Any): The gradients. In PyTorch's mode they are unscaled here,
                unless :meth:`unscale_` has already done so.

        Returns:
            array: Whether the step was applied, as a lazy 0-d bool array.

        Example:
            >>> import mlx.core as mx, mlx.nn as nn, mlx.optimizers as optim
            >>> from mlx_gradscale import GradScaler
            >>> model, optimizer, scaler = nn.Linear(1, 1), optim.SGD(1.0), GradScaler()
            >>> loss_fn = scaler.value_and_grad(model, lambda x: mx.mean(model(x)))
            >>> _, grads = loss_fn(mx.array([[float("inf")]]))
            >>> scaler.step(optimizer, model, grads)
            array(False, dtype=bool)
        """
        return self._step_model(optimizer, model, grads, is_last=False)

    def apply_gradients(self, optimizer: Optimizer, grads: Any, parameters: Any) -> Any:
        """Like :meth:`step`, but take and return a tree of parameters.

        ``parameters`` must contain every parameter that has a gradient. The returned
        tree has the structure of ``grads``.
        """
        return self._step(optimizer, grads, parameters, is_last=False)

    def minimize(self, optimizer: Optimizer, model: nn.Module, grads: Any) -> mx.array:
        """Call :meth:`step` and :meth:`update`; return the result of :meth:`step`."""
        return self._step_model(optimizer, model, grads, is_last=True)

    def _participant(self, optimizer: Any) -> Participant:
        if is_wrapper(optimizer):
            wrapped: Participant = optimizer._participant(self)
            return wrapped
        check_supported(optimizer)
        return Participant(optimizer, self._ranks)

    def _step_model(
        self, optimizer: Any, model: nn.Module, grads: Any, is_last: bool
    ) -> mx.array:
        _check_model(model, "apply_gradients()")
        self._step(optimizer, grads, model, is_last, in_place=True)
        return self._state["last_step_applied"]

    def _step(
        self,
        optimizer: Any,
        grads: Any,
        parameters: Any,
        is_last: bool,
        in_place: bool = False,
    ) -> Any:
        """Update parameters, in a new tree or in place, and the scale if ``is_last``.

        Nothing is written before the commit, except that an optimizer without state is
        initialized.
        """
        if not self._enabled and not is_wrapper(optimizer):
            if in_place:
                return optimizer.update(parameters, grads)
            return optimizer.apply_gradients(grads, parameters)
        participant = self._participant(optimizer)
        storage, ranks = participant.storage, participant.ranks
        stage = self._stages.get(id(optimizer))
        if stage and stage.finite is None:
            raise RuntimeError(
                "step() was called twice for this optimizer since the last update(). "
                "Call update() once per iteration. If step() runs inside mx.compile, "
                f"call update() in the same function. {_START_AFRESH}"
            )
        leaves = match(grads, parameters)
        gradients = list(map(attrgetter("gradient"), leaves))
        if ranks.is_single and FLOATING.isdisjoint(map(attrgetter("dtype"), gradients)):
            raise ValueError(
                "No floating-point parameter has a gradient. Unfreeze some parameters."
            )
        if self._mode == _SCALED and not stage:
            leaves = _replaced(leaves, unscale(gradients, self._inverse(optimizer)))
        if self._enabled:
            self._warn_about(leaves, participant)
        if needs_init(optimizer) or needs_init(participant.optimizer):
            trained = tree_of({x.path: x.parameter for x in leaves}, grads)
            if is_wrapper(optimizer):
                optimizer.init(trained)
            else:
                initialize(optimizer, trained, storage)
        if ranks.average:
            averaged = ranks.averaged({x.path: x.gradient for x in leaves})
            leaves = _replaced(leaves, averaged.values())
        inputs = inspect(leaves, participant, stage.finite if stage else None)
        if not self._enabled:
            inputs = inputs._replace(applied=mx.array(True))
        new, writes = plan(participant, grads, inputs)
        if self._enabled:
            writes += self._advance(optimizer, inputs.applied, is_last)
            done = _Stage(optimizer, ranks, finite=None)
            writes.append((self._stages, id(optimizer), done))
        if in_place:
            for leaf in leaves:
                if leaf.path in new:
                    writes.append((leaf.container, leaf.key, new[leaf.path]))
        commit(writes)
        if is_last:
            self._end_iteration()
        if not in_place:
            return tree_of({x.path: x.parameter for x in leaves} | new, grads)

    def _warn_about(self, leaves: list[Leaf], participant: Participant) -> None:
        """Warn about gradients that may have underflowed, and updates that are lost."""
        dtypes = set(map(attrgetter("parameter.dtype"), leaves))
        is_scaled = self._mode is not None or not self._expects_scaling
        if mx.float16 in dtypes and not (is_scaled and participant.scales_loss):
            self._backward.warn_once("unscaled float16")
        if participant.state is None and not dtypes.isdisjoint(HALF):
            self._backward.warn_once("no master weights")

    def update(self, new_scale: float | mx.array | None = None) -> None:
        """Update the scale according to the steps since the last update.

        Call it once per iteration, after :meth:`step`. To drop a batch, call
        :meth:`unscale_` instead of :meth:`step`, so that an overflow still counts.

        Args:
            new_scale (float or array, optional): Set the scale to this value instead,
                clamped to ``min_scale`` and ``max_scale``. An array whose value is not
                positive and finite leaves the scale unchanged.
        """
        if not self._enabled:
            return
        if new_scale is not None:
            scale = rule.clamp(self._state, new_scale)
            if not isinstance(new_scale, mx.array):
                read(scale)  # MLX cannot evaluate it in another thread
            changed = {"scale": scale, "skips_since_update": mx.array(0)}
            commit((self._state, name, x) for name, x in changed.items())
            self._end_iteration()
            return
        if not self._stages:
            raise RuntimeError(
                "update() was called without a step. Call step() first or, to drop a "
                "batch, unscale_(). If step() runs inside mx.compile, call update() in "
                "the same function."
            )
        commit(self._advance(None, None, is_last=True))
        self._end_iteration()

    def _end_iteration(self) -> None:
        self._stages.clear()
        self._skip_watch.look(self._state, self._backward.warn_once)

    def _advance(
        self, optimizer: Optimizer | None, applied: mx.array | None, is_last: bool
    ) -> Writes:
        """Return the writes to the state after a step and, if ``is_last``, an update.

        An ``update()`` by itself has no ``optimizer`` and no ``applied``.
        """
        unstepped = None
        if is_last:  # gradients that were unscaled but not stepped count too
            unstepped = []
            for stage in self._stages.values():
                if stage.finite is not None and stage.optimizer is not optimizer:
                    unstepped.append(stage.ranks.agree(stage.finite))
        changed = _advanced(self._state, applied, unstepped)
        by, now, updated = self._scaled
        if optimizer is not None and is_last and now is self._state["scale"]:
            self._scaled = _Scaled(by, changed["scale"], updated | {id(optimizer)})
        return list(zip(repeat(self._state), changed, changed.values(), strict=False))

    def get_scale(self) -> float:
        """Return the scale, read from the device, or 1.0 if the scaler is disabled."""
        return float(self._get("scale")) if self._enabled else 1.0

    def is_enabled(self) -> bool:
        """Return whether the scaler scales losses and skips steps."""
        return self._enabled

    def get_growth_factor(self) -> float:
        """Return the factor that multiplies the scale when it grows."""
        return float(self._get("growth_factor"))

    def set_growth_factor(self, new_factor: float) -> None:
        """Set the growth factor, for compiled steps too."""
        self._set("growth_factor", new_factor)

    def get_backoff_factor(self) -> float:
        """Return the factor that multiplies the scale when it backs off."""
        return float(self._get("backoff_factor"))

    def set_backoff_factor(self, new_factor: float) -> None:
        """Set the backoff factor, for compiled steps too."""
        self._set("backoff_factor", new_factor)

    def get_growth_interval(self) -> int:
        """Return the number of finite steps after which the scale grows."""
        return int(self._get("growth_interval"))

    def set_growth_interval(self, new_interval: int) -> None:
        """Set the growth interval, for compiled steps too."""
        self._set("growth_interval", new_interval)

    def _get(self, name: str) -> Any:
        return rule.read_field(name, self._state[name])

    def _set(self, name: str, value: Any) -> None:
        rule.check(rule.read(self._state) | {name: value})
        self._state |= rule.as_arrays({name: value})

    @property
    def skipped_steps(self) -> mx.array:
        """The total number of skipped steps, as a lazy 0-d array."""
        return self._state["skipped_steps"]

    @property
    def consecutive_skips(self) -> mx.array:
        """The number of consecutive overflows, as a lazy 0-d array."""
        return self._state["consecutive_skips"]

    @property
    def last_step_applied(self) -> mx.array:
        """Whether the last step was applied, as a lazy 0-d array."""
        return self._state["last_step_applied"]

    def __repr__(self) -> str:
        if not self._enabled:
            return "GradScaler(enabled=False)"
        values = (f"{k}={read(self._state[k])}" for k in ("scale", "skipped_steps"))
        return f"GradScaler({', '.join(values)})"

    def state_dict(self) -> dict[str, Any]:
        """Return the state as Python numbers, in PyTorch's format.

        The dict contains PyTorch's five keys, and this package's own fields only if
        they differ from their defaults. The dict of a disabled scaler is empty.
        """
        return rule.to_state_dict(rule.read(self._state)) if self._enabled else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict from this class or from PyTorch's ``GradScaler``.

        If the state is invalid, this raises and loads nothing. Missing counters start
        at zero, missing settings keep their current values, and unknown keys are
        ignored. A disabled scaler ignores the state.
        """
        if self._enabled:
            values = rule.from_state_dict(state_dict, rule.read(self._state))
            self._replace(rule.as_arrays(values))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the state dict to a single file, atomically.

        The name must end in ``.pt``, ``.json``, ``.safetensors``, ``.pt.gz`` or
        ``.json.gz``.
        """
        from ..state_files import save_state

        save_state(path, self.state_dict())

    def load(self, path: str | os.PathLike[str]) -> None:
        """Load a state dict from a file written by :meth:`save` or ``torch.save``."""
        from ..state_files import load_state

        self.load_state_dict(load_state(path))

    def __getstate__(self) -> dict[str, Any]:
        if self._stages:
            raise RuntimeError(
                "A GradScaler can only be copied or pickled between iterations. Call "
                f"update() first. {_START_AFRESH}"
            )
        mx.eval(self._state)  # MLX cannot evaluate a lazy array in another thread
        # Both may hold placeholders of mx.compile, which cannot be copied.
        return vars(self) | {"_skip_watch": SkipWatch(), "_scaled": _Scaled()}

    def __copy__(self) -> "GradScaler":
        return deepcopy(self)


@mx.compile
def _advanced(
    state: dict[str, mx.array],
    applied: mx.array | None,
    unstepped: list[mx.array] | None,
) -> dict[str, mx.array]:
    """Count a step if ``applied`` is given; update if ``unstepped`` is a list."""
    changed = {} if applied is None else rule.count_step(state, applied)
    if unstepped is not None:
        # Skips are counted in the state, so that compiled steps count as well.
        has_no_skips = (state | changed)["skips_since_update"] == 0
        finite = reduce(mx.logical_and, unstepped, has_no_skips)
        changed |= rule.next_scale(state, finite)
    return root_of(changed)


def _replaced(leaves: list[Leaf], gradients: Iterable[mx.array]) -> list[Leaf]:
    pairs = zip(leaves, gradients, strict=True)
    return [leaf._replace(gradient=x) for leaf, x in pairs]


def _check_model(model: Any, instead: str) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"The model must be an nn.Module, got {type(model).__name__}. For a tree "
            f"of parameters, use {instead}."
        )
