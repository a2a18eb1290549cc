"""``LossScaleOptimizer``: loss scaling and float32 masters as a drop-in optimizer."""

import weakref
from collections.abc import Callable
from inspect import signature
from numbers import Real
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.optimizers import Optimizer
from mlx.utils import tree_flatten, tree_map, tree_map_with_path, tree_unflatten

from .distributed import average_gradients
from .distributed.agreement import compare_optimizers
from .distributed.decision import Sharded, agreed, is_alone, norm_over_ranks
from .finite import all_finite_times, is_finite_magnitude, is_floating
from .guard import fitting_parameters, guarded_apply, initialize, unscale
from .half import BITS, HALF, full_precision, half_bits, to_float32
from .optimizer_state import check_loaded, write_in_place
from .scaler import GradScaler, is_wrapped
from .state_slots import copies, restore
from .tracing import evaluate_unless_traced, not_constant


class LossScaleOptimizer(Optimizer):
    """Wrap an optimizer for float16 training with scaled gradients.

    For each float16 or bfloat16 parameter a float32 master lives in the state; the
    inner optimizer sees only float32. A step with a gradient that is not finite
    changes nothing but the scale, decided on the device.

    Args:
        optimizer (Optimizer): Any optimizer of ``mlx.optimizers``.
        scaler (GradScaler, optional): The scaler to use. Default: a new one.
        max_grad_norm (float, optional): Clip the global norm of the unscaled
            gradients to this; ``float("inf")`` only measures it for
            :attr:`grad_norm`. Default: ``None``.
        group (mx.distributed.Group, optional): The ranks that train together: all
            take a step, or none. Without ``average`` the gradients are taken for
            shards, and the norm is over all of them. Default: ``None``.
        average (str, optional): Average the gradients over the group first.
            ``"float32"`` unscales them and sums in float32; ``"scaled"`` sums them
            scaled in their own dtype: half the bytes for float16, and a sum that
            does not fit skips the step. Default: ``None``.
        sharded (Callable, optional): Told path and gradient, whether this is a shard;
            others are copies, which count once in the norm, or are averaged. Default:
            all are, or with ``average`` none.

    Example:
        >>> import mlx.core as mx, mlx.nn as nn, mlx.optimizers as optim
        >>> from mlx_gradscale import GradScaler, LossScaleOptimizer
        >>> model = nn.Linear(4, 1)
        >>> model.set_dtype(mx.float16)
        >>> scaler = GradScaler(init_scale=1024.0)
        >>> optimizer = LossScaleOptimizer(optim.AdamW(1e-3), scaler)
        >>> def loss_fn(x, y):
        ...     return nn.losses.mse_loss(model(x).astype(mx.float32), y)
        >>> loss_and_grad = nn.value_and_grad(model, optimizer.scale_loss(loss_fn))
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
        **inner: Any,
    ):
        for name in inner:
            if name in signature(GradScaler.__init__).parameters:
                raise TypeError(
                    f"{name} belongs to the scaler: write "
                    f"LossScaleOptimizer(optimizer, GradScaler({name}=...))."
                )
            raise TypeError(
                f"LossScaleOptimizer has no argument {name}. If it belongs to the "
                "optimizer inside, write LossScaleOptimizer(AdamW(..., "
                "weight_decay=0.1)), for example."
            )
        if not isinstance(optimizer, Optimizer):
            raise TypeError(
                f"Expected an optimizer of mlx.optimizers, got {optimizer!r}. Write "
                "LossScaleOptimizer(AdamW(1e-4)), for example."
            )
        if is_wrapped(optimizer):
            raise TypeError(
                "This optimizer is, or holds, a LossScaleOptimizer already: wrap only "
                "once, outermost."
            )
        if scaler is not None and not isinstance(scaler, GradScaler):
            raise TypeError(f"scaler must be a GradScaler, got {scaler!r}.")
        if scaler is not None and scaler._owner is not None and scaler._owner():
            raise ValueError(
                "This scaler belongs to another LossScaleOptimizer, which moves its "
                "scale at each step: give each its own."
            )
        if max_grad_norm is not None and (
            not isinstance(max_grad_norm, Real)
            or isinstance(max_grad_norm, bool)
            or not max_grad_norm > 0
        ):
            raise ValueError(
                f"max_grad_norm must be a positive number, got {max_grad_norm!r}."
            )
        if average not in (None, "float32", "scaled"):
            raise ValueError(f'average must be "float32" or "scaled", got {average!r}.')
        if group is None and (average or sharded):
            raise ValueError(
                "average= and sharded= need a group: pass group=mx.distributed.init()."
            )
        super().__init__()
        self.optimizer = optimizer
        self._scaler = GradScaler() if scaler is None else scaler
        self.scaler._owner = weakref.ref(self)
        self._max_grad_norm = None if max_grad_norm is None else float(max_grad_norm)
        self.average = average
        self._group = group
        self._sharded = sharded
        # A scaler with a group of its own decides over that: shards in one group
        # can be averaged over another. Averages alone are equal already.
        self._deciders = self.scaler._group
        if self._deciders is None and (average is None or sharded):
            self._deciders = group
        elif average is None and group not in (None, self._deciders):
            raise ValueError(
                "The scaler has another group than this optimizer: leave one out, or "
                "say with average= that gradients are averaged over the optimizer's."
            )
        self._known: dict[str, tuple[int, ...]] = {}  # shapes by path
        self._loaded: dict[str, mx.array] | None = None
        self._scaler_before_load: dict[str, mx.array] = {}
        # One dict for life: compiled steps have captured it.
        self._state = {
            "optimizer": optimizer.state,
            "masters": {},
            "written": {},
            "scaler": self.scaler.state,
            "grad_norm": mx.array(0.0),
        }

    # The step

    def scale_loss(self, loss_fn: Callable) -> Callable:
        """Return ``loss_fn`` with the same value and a scaled gradient.

        See :meth:`GradScaler.scale_loss`.
        """
        return self.scaler.scale_loss(loss_fn)

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
        masters, written = self._state["masters"], self._state["written"]
        for path, parameter in tree_flatten(parameters):
            if parameter.dtype in HALF and path not in masters:
                masters[path] = parameter.astype(mx.float32)
                written[path] = half_bits(parameter)
        if self._loaded is not None:
            # The scaler has its state since the load, and may have moved on.
            scaler = {f"scaler.{k}": x for k, x in self.scaler.state.items()}
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
        if not self._initialized:
            self.init(trainable)
        there = {path for path, _ in tree_flatten(trainable)}
        for path, _ in tree_flatten(gradients):
            if path in self._known and path not in there:
                raise ValueError(f"There is a gradient for {path!r}, which is frozen.")
        model.update(self.apply_gradients(gradients, model, weight))

    def apply_gradients(
        self,
        gradients: Any,
        parameters: Any,
        weight: float | mx.array | None = None,
    ) -> Any:
        """Return the new parameters, in the structure of ``gradients``.

        Args:
            gradients (Any): Gradients of a loss from :meth:`scale_loss`.
            parameters (Any): A tree of parameters, at least those with gradients.
            weight (float or array, optional): As for :meth:`update`.
        """
        fitting = fitting_parameters(gradients, parameters)
        if not self._initialized:
            if self.average and not tree_flatten(gradients):
                raise ValueError(
                    "A rank without gradients in its first step must call "
                    "init(parameters) before it."
                )
            self.init(fitting)
        self._check_known(gradients, parameters)
        leaves = tree_flatten(fitting)
        self._check_shapes({path: x.shape for path, x in leaves})
        masters, written = self._state["masters"], self._state["written"]
        for path, parameter in leaves:
            if parameter.dtype in HALF and path not in masters:
                raise ValueError(
                    f"{path!r} became {parameter.dtype} after this optimizer was "
                    "initialised, and has no float32 master. Call init() again."
                )
        if self.scaler.is_enabled():
            self.scaler._check_optimizer(self.optimizer, "update")
        if self.scaler._records:
            raise RuntimeError(
                "unscale_() or step() of this optimizer's scaler was called: the "
                "optimizer unscales by itself, and would do it twice. To clip, use "
                "max_grad_norm=."
            )
        gradients, inverse = self._averaged(gradients, parameters, weight)
        inverse, finite, norm = self._inspect(gradients, inverse)
        new = guarded_apply(
            self.optimizer,
            gradients,
            parameters,
            inverse,
            finite,
            masters,
            written,
        )
        self._state["grad_norm"] = norm
        self.scaler._remember(gradients)
        self.scaler._count(finite)
        if self.scaler.is_enabled():
            self.scaler._move(finite)
        return new

    def _averaged(
        self, gradients: Any, parameters: Any, weight: float | mx.array | None
    ) -> tuple[Any, mx.array]:
        inverse = self.scaler._inverse()
        if self.average is None or is_alone(self._group):
            return gradients, inverse
        like = None
        if not tree_flatten(gradients):
            flat = tree_flatten(parameters)
            like = tree_unflatten([(p, x) for p, x in flat if p in self._known])
        if self.average == "float32":
            gradients, inverse = unscale(gradients, inverse), mx.array(1.0)
            like = like and tree_map(to_float32, like)
        sharded = self._sharded
        gradients = average_gradients(
            gradients,
            self._group,
            weight=weight,
            like=like,
            only=sharded and (lambda path, x: not sharded(path, x)),
        )
        return gradients, inverse

    def _inspect(
        self, gradients: Any, inverse: mx.array
    ) -> tuple[mx.array, mx.array, mx.array]:
        if self.max_grad_norm is None:
            norm = self._state["grad_norm"]
            if not self.scaler.is_enabled():
                return inverse, mx.array(True), norm
            finite = all_finite_times(gradients, inverse)
            return inverse, agreed(finite, self._deciders), norm
        # One pass gives the norm and tells whether all is finite, and clipping is
        # a factor in the unscaling. As in mlx.optimizers.clip_grad_norm.
        norm = norm_over_ranks(gradients, inverse, self._deciders, self._sharded)
        clip = mx.minimum(self.max_grad_norm / (norm + 1e-6), 1.0)
        return inverse * clip, is_finite_magnitude(norm), norm

    def _check_known(self, gradients: Any, parameters: Any) -> None:
        given = {p for p, x in tree_flatten(gradients) if is_floating(x)}
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
    def step(self) -> mx.array:
        """How many steps were applied."""
        return _first(self.optimizer).step

    @property
    def learning_rate(self) -> mx.array:
        """The inner optimizer's learning rate."""
        return self.optimizer.learning_rate

    @learning_rate.setter
    def learning_rate(self, learning_rate: float | mx.array) -> None:
        self.optimizer.learning_rate = learning_rate

    @property
    def max_grad_norm(self) -> float | None:
        """The norm to clip to, fixed at construction: compiled steps hold it."""
        return self._max_grad_norm

    @property
    def grad_norm(self) -> mx.array | None:
        """The unscaled norm of the last step's gradients, before clipping, lazily.

        None without ``max_grad_norm``, where it would cost a pass of its own.
        """
        return None if self.max_grad_norm is None else self._state["grad_norm"]

    def masters(self, parameters: Any) -> Any:
        """Return ``parameters`` in float32: the masters of those that have one.

        A weight that was replaced since the last step is its own master.

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
        masters, written = self._state["masters"], self._state["written"]
        return tree_map_with_path(
            lambda path, x: full_precision(x, masters.get(path), written.get(path)),
            parameters,
        )

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
            self._scaler_before_load = dict(self.scaler.state)
            for name in self.scaler.state:
                self.scaler.state[name] = loaded[f"scaler.{name}"]

    def _write(self, loaded: dict[str, mx.array]) -> None:
        # A file may be without what was written, or be of a model in the other half.
        derived = {}
        for path, here in self._state["written"].items():
            there = loaded.get(f"written.{path}")
            master = loaded.get(f"masters.{path}")
            if (there is None or there.dtype != here.dtype) and master is not None:
                dtype = next(half for half, bits in BITS.items() if bits == here.dtype)
                derived[f"written.{path}"] = half_bits(master.astype(dtype))
        write_in_place(self.state, loaded | derived)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_state": None, "_extra": self._own_state()}

    def __setstate__(self, pickled: dict[str, Any]) -> None:
        extra = pickled.pop("_extra")
        self.__dict__.update(pickled)
        # The same dicts as the parts have, not copies of them.
        self._state = {
            "optimizer": self.optimizer.state,
            "scaler": self.scaler.state,
            **extra,
        }
        self.scaler._owner = weakref.ref(self)

    def _own_state(self) -> dict[str, Any]:
        return {k: self._state[k] for k in ("masters", "written", "grad_norm")}


def _first(optimizer: Optimizer) -> Optimizer:
    while hasattr(optimizer, "optimizers"):
        optimizer = optimizer.optimizers[0]
    return optimizer
