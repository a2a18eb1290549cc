"""``LossScaleOptimizer``: loss scaling and float32 masters as a drop-in optimizer."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.optimizers import Optimizer
from mlx.utils import tree_flatten, tree_map_with_path, tree_unflatten

from .distributed.agreement import compare_optimizers
from .distributed.consensus import Sharded
from .distributed.ranks import Ranks
from .finite import is_finite_magnitude, is_floating
from .guard import (
    PlannedStep,
    fitting_parameters,
    initialize,
    is_emptied,
    planned_step,
)
from .loss_scale import SCALED_GRADIENTS, TRUE_GRADIENTS
from .masters import HALF, Masters
from .optimizer_state import NOT_LOADED, check_loaded, write_in_place
from .scale import FIELDS
from .scaler import GradScaler, check_not_empty
from .state_tree import copies, flatten, leaves_of, restore
from .tracing import evaluate_unless_traced, not_constant
from .wrapping import (
    check_norm,
    check_optimizer,
    check_scaler,
    note_wrapper,
    refuse_argument,
)


class LossScaleOptimizer(Optimizer):
    """Wrap an optimizer for float16 training.

    For each float16 or bfloat16 parameter a float32 master lives in the state; the
    inner optimizer sees only float32. A step with a gradient that is not finite
    changes nothing but the scale, decided on the device. Attributes of the inner
    optimizer, such as ``weight_decay``, are read and set through the wrapper.

    Args:
        optimizer (Optimizer): Any optimizer of ``mlx.optimizers``.
        scaler (GradScaler, optional): The scaler to use. Default: a new one.
        max_grad_norm (float, optional): Clip the global norm of the true
            gradients to this; ``float("inf")`` only measures it for
            :attr:`grad_norm`. Default: ``None``.
        group (mx.distributed.Group, optional): The ranks that train together: all
            take a step, or none. Without ``average`` the gradients are taken for
            shards, and the norm is over all of them. Default: ``None``.
        average (str, optional): Average the gradients over the group first.
            ``"float32"`` sums true gradients in float32; ``"scaled"`` sums those of
            ``scale_loss(..., unscale=False)`` in their own dtype: half the bytes for
            float16, and a sum that does not fit skips the step. Default: ``None``.
        sharded (Callable, optional): Told path and gradient, whether this is a shard;
            others are copies, which count once in the norm, or are averaged. Default:
            all are, or with ``average`` none.
        masters (str): How masters are kept. ``"float32"``: as float32 arrays.
            ``"remainder"``: as the weight and 16 bits of what rounding it lost, two
            bytes less for each half parameter, and the same masters but for the last
            bit of a bfloat16 one (:mod:`mlx_gradscale.masters.remainder` derives it).
            Slower where casts are, on CPUs. Default: ``"float32"``.

    Example:
        >>> import mlx.core as mx, mlx.nn as nn, mlx.optimizers as optim
        >>> from mlx_gradscale import GradScaler, LossScaleOptimizer
        >>> model = nn.Linear(4, 1)
        >>> model.set_dtype(mx.float16)
        >>> scaler = GradScaler(init_scale=1024.0)
        >>> optimizer = LossScaleOptimizer(optim.AdamW(1e-3), scaler)
        >>> def loss_fn(x, y):
        ...     return nn.losses.mse_loss(model(x).astype(mx.float32), y)
        >>> loss_and_grad = optimizer.value_and_grad(model, loss_fn)
        >>> loss, grads = loss_and_grad(mx.ones((2, 4), mx.float16), mx.zeros((2, 1)))
        >>> optimizer.update(model, grads)
        >>> optimizer.step, optimizer.scaler.last_step_applied
        (array(1, dtype=uint64), array(True, dtype=bool))
    """

    def __init__(
        self,
        optimizer: Optimizer,
        scaler: GradScaler | None = None,
        *,
        max_grad_norm: float | None = None,
        group: mx.distributed.Group | None = None,
        average: str | None = None,
        sharded: Sharded | None = None,
        masters: str = "float32",
        **inner: Any,
    ):
        for name in inner:
            refuse_argument(name)
        check_optimizer(optimizer)
        if scaler is not None:
            check_scaler(scaler)
        if max_grad_norm is not None:
            check_norm(max_grad_norm)
        super().__init__()  # type: ignore[no-untyped-call]
        self.optimizer = optimizer
        self._scaler = GradScaler() if scaler is None else scaler
        self._ranks = Ranks.of(group, average, sharded, self.scaler.group)
        self._masters = Masters(masters)
        self._clips = max_grad_norm is not None
        self._known: dict[str, tuple[int, ...]] = {}  # shapes by path
        self._loaded: dict[str, mx.array] | None = None
        self._scaler_before_load: dict[str, mx.array] = {}
        # One dict for life: compiled steps have captured it.
        self._state: dict[str, Any] = {
            "optimizer": optimizer.state,
            **self._masters.state,
            "scaler": self.scaler.state,
            "grad_norm": mx.array(0.0),
            "max_grad_norm": mx.array(float(max_grad_norm or "inf")),
        }
        self._own()

    def _own(self) -> None:
        note_wrapper(self, self.optimizer)
        self.scaler.belong_to(self)

    # The loss

    def value_and_grad(
        self,
        model: nn.Module,
        loss_fn: Callable[..., Any],
        compute_dtype: mx.Dtype | None = None,
        *,
        keep: Callable[[str, mx.array], bool] | None = None,
        cast_inputs: bool = True,
    ) -> Callable[..., Any]:
        """Like ``nn.value_and_grad``: the true loss and true gradients, in float32.

        See :meth:`GradScaler.value_and_grad`.

        Example:
            >>> import mlx.core as mx, mlx.nn as nn, mlx.optimizers as optim
            >>> from mlx_gradscale import GradScaler, LossScaleOptimizer
            >>> model = nn.Linear(2, 1)
            >>> model.set_dtype(mx.float16)
            >>> optimizer = LossScaleOptimizer(optim.SGD(0.1), GradScaler(1024.0))
            >>> loss_and_grad = optimizer.value_and_grad(
            ...     model, lambda x: model(x).astype(mx.float32).mean()
            ... )
            >>> loss, grads = loss_and_grad(mx.ones((4, 2), mx.float16))
            >>> grads["bias"], optimizer.scaler.get_scale()
            (array([1], dtype=float32), 1024.0)
        """
        self._refuse_scaled_average()
        return self.scaler.value_and_grad(
            model, loss_fn, compute_dtype, keep=keep, cast_inputs=cast_inputs
        )

    def scale_loss(
        self,
        loss_fn: Callable[..., Any],
        model: nn.Module | None = None,
        *,
        unscale: bool = True,
    ) -> Callable[..., Any]:
        """Return ``loss_fn`` for a trainer that differentiates it itself.

        It has the same value. The loss is scaled in the backward pass, and the
        gradients of the model's parameters are unscaled on their way out: what
        ``nn.value_and_grad`` returns are true gradients, in float32, whatever the
        trainer does with them.

        Args:
            loss_fn (Callable): Returns a scalar loss, or a tuple whose first
                element is the loss.
            model (nn.Module, optional): The model that is differentiated. Default:
                the models among the arguments of each call.
            unscale (bool): If False the gradients stay scaled, in the parameters'
                dtype, until :meth:`update`: two bytes less for each float16
                parameter, and nothing between may clip or add them up across a step.
                Default: ``True``.

        Example:
            >>> import mlx.core as mx, mlx.nn as nn, mlx.optimizers as optim
            >>> from mlx_gradscale import LossScaleOptimizer
            >>> model, optimizer = nn.Linear(2, 1), LossScaleOptimizer(optim.SGD(0.1))
            >>> loss_fn = optimizer.scale_loss(lambda model, x: model(x).mean())
            >>> nn.value_and_grad(model, loss_fn)(model, mx.ones((4, 2)))[1]["bias"]
            array([1], dtype=float32)
        """
        if not self.scaler.is_enabled():
            return loss_fn
        if not unscale:
            scaled = self.scaler.forward.scaled_loss(loss_fn)
            self.scaler.take_way(SCALED_GRADIENTS)
            return scaled
        self._refuse_scaled_average()
        true = self.scaler.forward.scale_loss(loss_fn, model)
        self.scaler.take_way(TRUE_GRADIENTS)
        return true

    def _refuse_scaled_average(self) -> None:
        if self._ranks.average == "scaled":
            raise ValueError(
                'average="scaled" sums scaled gradients, and these would be true ones: '
                'use average="float32", or scale_loss(loss_fn, unscale=False).'
            )

    # The step

    def init(self, parameters: Any) -> None:
        """Make the masters and the inner optimizer's state for ``parameters``.

        With a group every rank must call this, or take its first step: the ranks
        compare what they are about to train, and all raise where they differ. Not
        inside of ``mx.compile``: call it before a step that is compiled.

        Args:
            parameters (Any): Usually ``model.trainable_parameters()``.
        """
        floating = {p: x.shape for p, x in tree_flatten(parameters) if is_floating(x)}
        self._check_shapes(floating)
        compare_optimizers("init()", self, parameters)
        before = list(copies(self.state))
        initialize(self.optimizer, parameters, again=True)
        for path, parameter in tree_flatten(parameters):
            if parameter.dtype in HALF:
                self._masters.add(path, parameter)
        if self._loaded is not None:
            # The scaler has its state since the load, and may have moved on.
            scaler = {f"scaler.{k}": self.scaler.state[k] for k in FIELDS}
            other = {k: x for k, x in self._loaded.items() if k not in scaler}
            try:
                self._write(not_constant(other, parameters) | scaler)
            except ValueError:
                restore(before)
                self.scaler.state.update(self._scaler_before_load)
                raise
            self._loaded = None
        # Now, because lazy arrays of one thread cannot be used in another.
        evaluate_unless_traced(self.state)
        self._known |= floating
        self._initialized = True

    def update(
        self,
        model: nn.Module,
        gradients: Any,
        weight: float | mx.array | None = None,
    ) -> None:
        """Update the model's parameters in place, or leave them where they are.

        Args:
            model (nn.Module): The model to update.
            gradients (Any): Gradients of a loss from :meth:`scale_loss`. With
                ``average`` a rank that has none passes ``{}``.
            weight (float or array, optional): With ``average``, how much this rank
                counts: how many micro-batches the gradients are the mean of, for
                example. Default: 1, or 0 without gradients.
        """
        if not isinstance(model, nn.Module):
            raise TypeError(
                "update(model, gradients) takes a model first, got "
                f"{type(model).__name__}. Use apply_gradients for a parameter tree."
            )
        trainable = model.trainable_parameters()
        if self._needs_init():
            self.init(trainable)
        frozen = self._known.keys() - {path for path, _ in flatten(trainable)}
        for path, _ in tree_flatten(gradients) if frozen else []:
            if path in frozen:
                raise ValueError(f"There is a gradient for {path!r}, which is frozen.")
        self.scaler.check_model(model)
        plan, applied = self._plan(gradients, model, weight)
        if self.scaler.is_enabled():
            plan.writes += self.scaler.forward.taken_back(model, applied)
        plan.carry_out_on(model)

    def apply_gradients(
        self,
        gradients: Any,
        parameters: Any,
        weight: float | mx.array | None = None,
    ) -> Any:
        """Return the new parameters, in the structure of ``gradients``.

        Args:
            gradients (Any): As for :meth:`update`.
            parameters (Any): A tree of parameters, at least those with gradients.
            weight (float or array, optional): As for :meth:`update`.
        """
        plan, _ = self._plan(gradients, parameters, weight)
        return plan.carry_out()

    def _plan(
        self, gradients: Any, parameters: Any, weight: float | mx.array | None
    ) -> tuple[PlannedStep, mx.array]:
        fitting = fitting_parameters(gradients, parameters)
        if self._needs_init():
            if self._ranks.average and not tree_flatten(gradients):
                raise ValueError(
                    "A rank without gradients in its first step must call "
                    "init(parameters) before it."
                )
            self.init(fitting)
        if self._ranks.are_one:
            check_not_empty(gradients)
        leaves = flatten(fitting)
        given = zip(leaves, leaves_of(gradients), strict=True)
        floating = {p for (p, _), g in given if is_floating(g)}
        # Clipping by hand makes gradients of integer parameters floating.
        strange = floating - self._known.keys()
        floating -= {p for p, x in leaves if p in strange and not is_floating(x)}
        self._check_known(floating, parameters)
        self._check_shapes({path: x.shape for path, x in leaves})
        self._masters.check_has_all(leaves)
        if self.scaler.is_enabled():
            self.scaler.check_optimizer(self.optimizer, "update")
        self.scaler.refuse_stages()
        self.scaler.forward.check_passes(gradients)
        true = self.scaler.gives_true_gradients
        gradients, factor, loss_finite = self._ranks.averaged(
            gradients,
            {} if leaves else self._trained_among(parameters),
            weight,
            None if true else self.scaler.inverse(),
            self.scaler.state["loss_finite"],
        )
        if not leaves:
            fitting = fitting_parameters(gradients, parameters)
        factor, applied, loss_finite, norm = self._inspect(
            gradients, factor, loss_finite
        )
        plan = planned_step(
            self.optimizer, gradients, fitting, factor, applied, self._masters
        )
        plan.writes.append((self._state, "grad_norm", norm))
        plan.writes += self.scaler.after_step(
            gradients, applied, loss_finite, update=self.scaler.is_enabled()
        )
        return plan, applied

    def _needs_init(self) -> bool:
        return not self._initialized or (
            bool(self._known) and is_emptied(self.optimizer)
        )

    def _trained_among(self, parameters: Any) -> Any:
        flat = tree_flatten(parameters)
        return tree_unflatten([(p, x) for p, x in flat if p in self._known])

    def _inspect(
        self, gradients: Any, factor: mx.array | None, loss_finite: mx.array
    ) -> tuple[mx.array | None, mx.array, mx.array, mx.array]:
        if not self._clips:
            norm = self._state["grad_norm"]
            if not self.scaler.is_enabled():
                return factor, mx.array(True), loss_finite, norm
            applied, loss_finite = self._ranks.all_finite(
                gradients, factor, loss_finite
            )
            return factor, applied, loss_finite, norm
        # One pass gives the norm and tells whether all is finite, and clipping is
        # a factor in the unscaling. As in mlx.optimizers.clip_grad_norm.
        factor = mx.array(1.0) if factor is None else factor
        norm, loss_finite = self._ranks.norm(gradients, factor, loss_finite)
        clip = mx.minimum(self._state["max_grad_norm"] / (norm + 1e-6), 1.0)
        applied = is_finite_magnitude(norm)
        return factor * clip, applied, loss_finite, norm

    def _check_known(self, given: set[str], parameters: Any) -> None:
        for path in sorted(given - self._known.keys()):
            raise ValueError(
                f"{path!r} was not there, or was frozen, when this optimizer was "
                "initialised. Call init(model.trainable_parameters()) again, which "
                "keeps what it has."
            )
        # A tree of trainable parameters is without those that were frozen since.
        unseen = self._known.keys() - given
        if unseen and isinstance(parameters, nn.Module):
            there = {path for path, _ in tree_flatten(parameters)}
            for path in sorted(unseen - there):
                raise ValueError(
                    f"{path!r} is gone since this optimizer was initialised. Make a "
                    "new LossScaleOptimizer for the changed model."
                )

    def _check_shapes(self, shapes: dict[str, tuple[int, ...]]) -> None:
        for path, shape in shapes.items():
            known = self._known.get(path, shape)
            if shape != known:
                raise ValueError(
                    f"{path!r} has shape {shape}, and {known} when this optimizer was "
                    "initialised. Make a new LossScaleOptimizer for the changed model."
                )

    # What a user reads and sets

    @property
    def scaler(self) -> GradScaler:
        """The scaler, fixed at construction: the state holds its."""
        return self._scaler

    @property
    def kept_masters(self) -> Masters:
        """How the masters are kept, for who saves and loads them."""
        return self._masters

    @property
    def ranks(self) -> Ranks:
        """Who averages and decides together, as it was told at construction."""
        return self._ranks

    @property
    def step(self) -> mx.array:
        """How many steps were applied."""
        step: mx.array = _first(self.optimizer).step
        return step

    @property
    def learning_rate(self) -> mx.array:
        """The inner optimizer's learning rate."""
        learning_rate: mx.array = self.optimizer.learning_rate
        return learning_rate

    @learning_rate.setter
    def learning_rate(self, learning_rate: float | mx.array) -> None:
        self.optimizer.learning_rate = learning_rate

    @property
    def max_grad_norm(self) -> float | None:
        """The norm to clip to; set another, also for a step that is compiled.

        Reading it reads the device. Whether there is clipping at all is fixed at
        construction: ``float("inf")`` clips nothing.
        """
        return float(self._state["max_grad_norm"].item()) if self._clips else None

    @max_grad_norm.setter
    def max_grad_norm(self, max_grad_norm: float) -> None:
        if not self._clips:
            raise AttributeError(
                "This optimizer was made without clipping, and a compiled step would "
                'not notice: make it with max_grad_norm=float("inf"), then set it.'
            )
        check_norm(max_grad_norm)
        self._state["max_grad_norm"] = mx.array(float(max_grad_norm))

    @property
    def grad_norm(self) -> mx.array | None:
        """The unscaled norm of the last step's gradients, before clipping, lazily.

        None without ``max_grad_norm``, where it would cost a pass of its own.
        """
        return self._state["grad_norm"] if self._clips else None

    def masters(self, parameters: Any) -> Any:
        """Return ``parameters`` in float32: the masters of those that have one.

        A weight that was replaced since the last step is its own master; with
        ``masters="remainder"`` to within half its ulp.

        Args:
            parameters (Any): Usually ``model.trainable_parameters()``.

        Example:
            >>> import mlx.core as mx, mlx.optimizers as optim
            >>> from mlx_gradscale import LossScaleOptimizer
            >>> optimizer = LossScaleOptimizer(optim.SGD(0.1))
            >>> weights = {"w": mx.ones(2, mx.float16)}
            >>> optimizer.init(weights)
            >>> optimizer.masters(weights)
            {'w': array([1, 1], dtype=float32)}
        """
        return tree_map_with_path(self._masters.master_of, parameters)

    @property
    def state(self) -> dict[str, Any]:
        """All there is to save: a tree of arrays. Setting it writes in place.

        What is set before :meth:`init` is there from then on: the structure comes from
        the parameters.
        """
        # Again each time: a MultiOptimizer makes a new dict, and the user may have
        # replaced the inner optimizer's.
        self._state["optimizer"] = self.optimizer.state
        return self._state

    @state.setter
    def state(self, state: dict[str, Any]) -> None:
        loaded = dict(tree_flatten(state))
        check_loaded(loaded, self.scaler.state)
        # Now, while the file is there, and not inside a trace.
        mx.eval(loaded)
        compare_optimizers("the loading of a state", self, loaded)
        if self._initialized:
            self._write(loaded)
        else:
            # The structure is known only from the parameters: tree_flatten
            # drops empty containers, so the tree may be shorter than they are.
            # The scale is needed before, by the first loss.
            self._loaded = loaded
            self._scaler_before_load = {k: self.scaler.state[k] for k in FIELDS}
            for name in FIELDS:
                self.scaler.state[name] = loaded[f"scaler.{name}"]

    def _write(self, loaded: dict[str, mx.array]) -> None:
        loaded = self._masters.leaves_as_here(loaded)
        # The norm to clip to is what the program says now, and what forward passes
        # left is of no use without them.
        self.scaler.forward.forget()
        own = dict(tree_flatten(self.state))
        stays = {path: x for path, x in own.items() if path.startswith(NOT_LOADED)}
        loaded = {p: x for p, x in loaded.items() if not p.startswith(NOT_LOADED)}
        write_in_place(self.state, loaded | stays)

    def __getstate__(self) -> dict[str, Any]:
        own = {name: self._state[name] for name in ("grad_norm", "max_grad_norm")}
        return self.__dict__ | {"_state": own}

    def __setstate__(self, pickled: dict[str, Any]) -> None:
        self.__dict__.update(pickled)
        # The same dicts as the parts have, not copies of them.
        self._state = {
            "optimizer": self.optimizer.state,
            **self._masters.state,
            "scaler": self.scaler.state,
            **pickled["_state"],
        }
        self._own()

    def __getattr__(self, name: str) -> Any:
        # Only asked for what this object does not have.
        if name.startswith("_") or "optimizer" not in vars(self):
            raise AttributeError(name)
        try:
            return getattr(self.optimizer, name)
        except AttributeError:
            raise AttributeError(
                f"Neither LossScaleOptimizer nor {type(self.optimizer).__name__} has "
                f"an attribute {name!r}."
            ) from None

    def __setattr__(self, name: str, value: Any) -> None:
        inner = vars(self).get("optimizer")
        own = name.startswith("_") or hasattr(type(self), name) or name in vars(self)
        if own or not hasattr(inner, name):
            super().__setattr__(name, value)
        else:
            setattr(inner, name, value)


class GuardedOptimizer(LossScaleOptimizer):
    """Wrap an optimizer so that a bad step changes nothing, without loss scaling.

    For bfloat16, which has float32's range: float32 masters, steps with a gradient that
    is not finite are skipped and counted, and the loss function stays as it is. The
    same as ``LossScaleOptimizer(optimizer, GradScaler(1.0, dynamic=False))``.

    Args:
        optimizer (Optimizer): Any optimizer of ``mlx.optimizers``.
        **arguments (Any): ``max_grad_norm`` and the others of a
            :class:`LossScaleOptimizer`.

    Example:
        >>> import mlx.core as mx, mlx.nn as nn, mlx.optimizers as optim
        >>> from mlx_gradscale import GuardedOptimizer
        >>> model, optimizer = nn.Linear(2, 1), GuardedOptimizer(optim.SGD(0.1))
        >>> loss_and_grad = nn.value_and_grad(model, lambda x: model(x).mean())
        >>> loss, grads = loss_and_grad(mx.array([[float("nan"), 1.0]]))
        >>> optimizer.update(model, grads)
        >>> optimizer.scaler.skipped_steps
        array(1, dtype=int32)
    """

    def __init__(self, optimizer: Optimizer, **arguments: Any):
        super().__init__(optimizer, GradScaler(1.0, dynamic=False), **arguments)


def _first(optimizer: Optimizer) -> Optimizer:
    while hasattr(optimizer, "optimizers"):
        optimizer = optimizer.optimizers[0]
    return optimizer
