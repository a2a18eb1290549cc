"""``MasterWeightOptimizer`` and ``LossScaleOptimizer``: wrappers as drop-in optimizers.

Both keep float32 master weights and skip steps with non-finite gradients. The first
does not scale the loss; its scale is fixed at 1.
"""

from collections.abc import Callable
from contextlib import suppress
from numbers import Real
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.optimizers import Optimizer
from mlx.utils import tree_map_with_path

from .guard import Participant
from .masters import HALF, Storage
from .optimizers import check_supported, initialize, is_builtin, single_optimizers
from .ranks import Ranks, Sharded
from .scaler import GradScaler
from .state import STORAGES, State, load, parse, take, wait
from .trees import flatten, match, read, restore, snapshot


class MasterWeightOptimizer(Optimizer):
    """Wrap an optimizer with float32 master weights and step skipping.

    The inner optimizer updates the master weights of float16 and bfloat16 parameters in
    float32. A step with a non-finite gradient is skipped: the parameters and the inner
    optimizer do not change. Attributes of the inner optimizer, such as
    ``weight_decay``, can be read and set through the wrapper.

    Use it with bfloat16, which has the same range as float32 and needs no loss scaling.
    Get the gradients from ``nn.value_and_grad``. For float16, use
    :class:`LossScaleOptimizer`.

    Args:
        optimizer (Optimizer): An optimizer from ``mlx.optimizers``, or a third-party
            ``Optimizer`` that does not override ``update``. The latter costs one device
            read per eager step.
        max_grad_norm (float, optional): Clip the global norm of the unscaled gradients
            to this value; ``float("inf")`` only computes :attr:`grad_norm`.
            Default: ``None``.
        state_bits (int): How to store master weights and moments: in float32 (32), as
            rounding errors and bfloat16 moments (16), or as 8-bit rounding errors and,
            for ``Adam`` and ``AdamW``, 8-bit moments (8). With AdamW, a half-precision
            parameter takes 14, 8 or 5 bytes, weight included; 16 and 8 are slower on
            CPUs. Only for optimizers from ``mlx.optimizers``. Default: ``32``.
        group (mx.distributed.Group, optional): The ranks that train together. Either
            all of them apply a step or none does. Default: ``None``.
        average (bool): Average the gradients, except shards, over the group in float32.
            Default: ``False``.
        sharded (Callable or bool, optional): Which gradients are shards: a function of
            path and array, or a bool for all of them. Other gradients must be equal on
            all ranks once averaged, and count once in the norm. Default: ``None``.

    Example:
        >>> import mlx.core as mx, mlx.nn as nn, mlx.optimizers as optim
        >>> from mlx_gradscale import MasterWeightOptimizer
        >>> model, optimizer = nn.Linear(2, 1), MasterWeightOptimizer(optim.SGD(0.1))
        >>> loss_and_grad = nn.value_and_grad(model, lambda x: model(x).mean())
        >>> loss, grads = loss_and_grad(mx.array([[float("nan"), 1.0]]))
        >>> optimizer.update(model, grads)
        >>> optimizer.scaler.skipped_steps
        array(1, dtype=int32)
    """

    _scales_loss = False
    _scaler: GradScaler

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        max_grad_norm: float | None = None,
        state_bits: int = 32,
        group: mx.distributed.Group | None = None,
        average: bool = False,
        sharded: Sharded | None = None,
    ):
        check_supported(optimizer)
        self._clips = max_grad_norm is not None
        if self._clips:
            _check_norm(max_grad_norm)
        _check_state_bits(state_bits, optimizer)
        super().__init__()  # type: ignore[no-untyped-call]
        if not self._scales_loss:
            self._scaler = GradScaler(1.0, dynamic=False)
        self.optimizer = optimizer
        group = self._scaler.group if group is None else group
        self._ranks = Ranks(group, average, sharded, self._clips)
        self._state_bits = state_bits
        # The state is made of the dicts that each part uses itself.
        entries = {"optimizer": optimizer.state, "scaler": self._scaler.state}
        entries |= {"grad_norm": mx.array(0.0)}
        entries |= {"max_grad_norm": mx.array(float(max_grad_norm or "inf"))}
        self._state: State = State(optimizer, self._storage.names, entries)
        self._state.remove_masters()
        # Whether a loaded state waits for init().
        self._is_waiting = False

    @property
    def _storage(self) -> Storage:
        """How master weights and moments are stored."""
        return STORAGES[self._state_bits]

    def value_and_grad(
        self, model: nn.Module, loss_fn: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Callable[..., Any]:
        """Differentiate with loss scaling; see :meth:`GradScaler.value_and_grad`."""
        return self.scaler.value_and_grad(model, loss_fn, *args, **kwargs)

    def scale_loss(
        self,
        loss_fn: Callable[..., Any],
        model: Any = None,
        compute_dtype: mx.Dtype | None = None,
    ) -> Callable[..., Any]:
        """Wrap a loss function for a trainer; see :meth:`GradScaler.scale_loss`."""
        return self.scaler.scale_loss(loss_fn, model, compute_dtype)

    def init(self, parameters: Any) -> None:
        """Create master weights and the inner optimizer's state for ``parameters``.

        Call this before compiling a step, and again after unfreezing or adding layers;
        existing state is kept. All ranks of a group must call it, and all of them raise
        if their settings or parameters differ. Parameter values are compared only with
        ``average=True``, and shards are not compared.

        Args:
            parameters (Any): Usually ``model.trainable_parameters()``.
        """
        if not self._ranks.is_single:
            settings = self.scaler.state_dict() | {"max_grad_norm": self.max_grad_norm}
            settings["state_bits"] = self._state_bits
            self._ranks.compare(parameters, self.optimizer, settings)
        before, storage = snapshot(self.state), self._storage
        try:
            loaded = take(self.state) if self._is_waiting else None
            initialize(self.optimizer, parameters, storage)
            weights = dict(flatten(parameters))
            for path, x in weights.items():
                if x.dtype in HALF and not storage.has(self._state, path):
                    storage.put(self._state, path, x, x)
            if loaded is not None:
                load(self.state, loaded, self._state_bits, weights)
        except BaseException:
            restore(before)
            raise
        self._is_waiting, self._initialized = False, True
        self._evaluate()

    def _evaluate(self) -> None:
        # Now, because MLX cannot evaluate a lazy array in another thread.
        with suppress(ValueError, RuntimeError):  # inside mx.compile
            mx.eval(self.state)

    def update(self, model: nn.Module, gradients: Any) -> None:
        """Update the model in place, or skip the step; then update the loss scale.

        The step is skipped if a gradient or, with clipping, the norm is non-finite. If
        optimizers share a scaler, call ``scaler.step`` for each of them and then
        ``scaler.update()`` instead: each call of this method counts an iteration.

        Args:
            model (nn.Module): The model to update.
            gradients (Any): The gradients. They must be unscaled, unless they come from
                :meth:`GradScaler.scale`.
        """
        self._scaler.minimize(self, model, gradients)

    def apply_gradients(self, gradients: Any, parameters: Any) -> Any:
        """Like :meth:`update`, but take and return a tree of parameters.

        ``parameters`` must contain every parameter that has a gradient. The returned
        tree has the structure of ``gradients``.
        """
        return self._scaler._step(self, gradients, parameters, is_last=True)

    def _participant(self, scaler: GradScaler) -> Participant:
        """Describe this optimizer to its scaler; raise if it has another one."""
        if scaler is not self._scaler:
            raise ValueError(
                f"This {type(self).__name__} was created with another scaler. Create a "
                "LossScaleOptimizer(optimizer, scaler) with this one, or call the "
                "optimizer's own update(model, grads)."
            )
        return Participant(
            self.optimizer,
            self._ranks,
            self._storage,
            self._state,
            clips=self._clips,
            scales_loss=self._scales_loss,
        )

    @property
    def scaler(self) -> GradScaler:
        """The loss scaler, which cannot be replaced."""
        return self._scaler

    @property
    def group(self) -> mx.distributed.Group | None:
        """The ranks that train together, or None."""
        return self._ranks.group

    @property
    def max_grad_norm(self) -> float | None:
        """The maximum gradient norm, or None if the optimizer was created without one.

        A new value takes effect in compiled steps too.
        """
        return float(self._state["max_grad_norm"]) if self._clips else None

    @max_grad_norm.setter
    def max_grad_norm(self, max_grad_norm: float) -> None:
        if not self._clips:
            raise AttributeError(
                "This optimizer was created without max_grad_norm. To set it later, "
                "create the optimizer with max_grad_norm=float('inf')."
            )
        _check_norm(max_grad_norm)
        self._state["max_grad_norm"] = mx.array(float(max_grad_norm))

    @property
    def grad_norm(self) -> mx.array | None:
        """The last gradient norm before clipping, or None without ``max_grad_norm``."""
        return self._state["grad_norm"] if self._clips else None

    def masters(self, parameters: Any) -> Any:
        """Return ``parameters`` in float32, using master weights where they exist.

        If a weight was replaced after a step, the result is at most half a unit in the
        last place from the new weight.
        """
        storage, state = self._storage, self._state

        def master_of(path: str, x: mx.array) -> mx.array:
            stored = storage.get(state, path, x) if storage.has(state, path) else {}
            return storage.join(x, stored).master

        return tree_map_with_path(master_of, parameters)

    def set_masters(self, parameters: Any, masters: Any) -> None:
        """Replace the master weights of half-precision parameters.

        Args:
            parameters (Any): The parameters of the model.
            masters (Any): The float32 values that the parameters were rounded from, in
                the same structure. Parameters may be left out, and those that were
                frozen in :meth:`init` are ignored.
        """
        found = match(masters, parameters, "master weight")
        found = [leaf for leaf in found if leaf.parameter.dtype in HALF]
        if self._initialized:
            found = [x for x in found if self._storage.has(self._state, x.path)]
        for path, _, _, weight, master in found:
            rounded = master.astype(mx.float32).astype(weight.dtype)
            if not mx.array_equal(rounded, weight, equal_nan=True):
                raise ValueError(
                    f"The master weights of {path!r} do not round to the parameter. "
                    "Set the parameter first, or leave out its master weights."
                )
        for path, _, _, weight, master in found:
            self._storage.put(self._state, path, master, weight)
        self._evaluate()

    @property
    def state(self) -> State:
        """The tree of arrays to save and to pass to ``mx.compile``.

        Assigning a saved state replaces the arrays in the existing dicts, except
        ``max_grad_norm``. If you assign it before :meth:`init`, :meth:`init` checks it
        against the parameters. ``state_bits=32`` loads a state of other
        ``state_bits``, decoded, in the next :meth:`init` or step; load the weights
        before. Assigning ``{}`` frees moments and master weights, until you assign the
        old state again. Keys like "step" are the inner optimizer's.
        """
        # Refresh on every access: a MultiOptimizer builds a new dict each time, and the
        # user may have replaced the inner optimizer's state.
        dict.__setitem__(self._state, "optimizer", self.optimizer.state)
        return self._state

    @state.setter
    def state(self, state: Any) -> None:
        if state in ({}, []):
            state = self.state.emptied()
        if isinstance(state, State) and state.owner is self.optimizer:
            if state is not self._state:  # one that this optimizer had earlier
                state["max_grad_norm"] = self._state["max_grad_norm"]
                self._state = state
                self._is_waiting = self._initialized = False
                self.optimizer.state = state["optimizer"]
            return
        loaded, fields = parse(state, self.state)
        if self._initialized:
            self._initialized = load(self.state, loaded, self._state_bits, None)
        if not self._initialized:
            wait(self.state, loaded)
            self._is_waiting = True
        self.scaler._replace(fields)
        self._evaluate()

    def __repr__(self) -> str:
        parts = [type(self.optimizer).__name__]
        if self._scales_loss:
            parts.append(repr(self.scaler))
        if self._clips:
            norm = read(self._state["max_grad_norm"])
            parts.append(f"max_grad_norm={norm}")
        if self._state_bits != 32:
            parts.append(f"state_bits={self._state_bits}")
        if self.group is not None:
            shown = {"average": self._ranks.average, "sharded": self._ranks.sharded}
            parts.append(f"group of {self.group.size()}")
            parts += [f"{name}={x!r}" for name, x in shown.items() if x]
        return f"{type(self).__name__}({', '.join(parts)})"

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_state": dict(self.state)}

    def __setstate__(self, pickled: dict[str, Any]) -> None:
        vars(self).update(pickled)
        self._state = State(self.optimizer, self._storage.names, pickled["_state"])

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or "optimizer" not in vars(self):
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def __setattr__(self, name: str, value: Any) -> None:
        inner = vars(self).get("optimizer")
        if name == "optimizer" and inner is not None:
            raise AttributeError(
                "The inner optimizer cannot be replaced. Create a new "
                f"{type(self).__name__}."
            )
        own = name.startswith("_") or hasattr(type(self), name) or name in vars(self)
        if own or not hasattr(inner, name):
            super().__setattr__(name, value)
        else:
            setattr(inner, name, value)


class LossScaleOptimizer(MasterWeightOptimizer):
    """Wrap an optimizer with loss scaling and float32 master weights.

    A :class:`MasterWeightOptimizer` whose scaler also scales the loss, for float16. A
    skipped step counts as an overflow, after which the scale falls.

    Args:
        optimizer (Optimizer): As in :class:`MasterWeightOptimizer`.
        scaler (GradScaler, optional): The loss scaler. Default: a new ``GradScaler``.
        max_grad_norm, state_bits, group, average, sharded: As in
            :class:`MasterWeightOptimizer`. The default of ``group`` is that of
            ``scaler``.

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
        >>> optimizer
        LossScaleOptimizer(AdamW, GradScaler(scale=1024.0, skipped_steps=0))
    """

    _scales_loss = True

    def __init__(
        self,
        optimizer: Optimizer,
        scaler: GradScaler | None = None,
        *,
        max_grad_norm: float | None = None,
        state_bits: int = 32,
        group: mx.distributed.Group | None = None,
        average: bool = False,
        sharded: Sharded | None = None,
    ):
        if scaler is not None and not isinstance(scaler, GradScaler):
            raise TypeError(f"scaler must be a GradScaler, got {scaler!r}.")
        self._scaler = GradScaler() if scaler is None else scaler
        super().__init__(
            optimizer,
            max_grad_norm=max_grad_norm,
            state_bits=state_bits,
            group=group,
            average=average,
            sharded=sharded,
        )


def _check_state_bits(state_bits: Any, optimizer: Optimizer) -> None:
    if not isinstance(state_bits, int) or state_bits not in STORAGES:
        raise ValueError(f"state_bits must be 32, 16 or 8, got {state_bits!r}.")
    for part in single_optimizers(optimizer):
        if state_bits != 32 and not is_builtin(part):
            raise ValueError(
                f"state_bits={state_bits} requires an optimizer from mlx.optimizers. "
                f"{type(part).__name__} manages its own state. Use state_bits=32."
            )


def _check_norm(value: Any) -> None:
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    # The limit is a float32 array, where 1e-46 is zero.
    if not is_number or not value >= 2.0**-149:
        raise ValueError(f"max_grad_norm must be a positive number, got {value!r}.")
