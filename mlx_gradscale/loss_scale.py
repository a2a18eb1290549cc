"""What a scaler and a wrapped optimizer stand on: the loss scale as an object."""

import os
import weakref
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from . import distributed
from . import state_files as files
from .diagnostics.alarm import SkipAlarm, check_skips
from .distributed.agreement import compare_scalers
from .notices import warn_user
from .precision.double_scaling import scaled_once
from .precision.forward import Forward
from .scale import (
    FIELDS,
    SETTINGS,
    as_array,
    check,
    count_step,
    next_scale,
    read,
    read_field,
)
from .state_dict import from_state_dict, to_state_dict
from .state_tree import Writes

# The two ways, as they are named in errors.
TRUE_GRADIENTS = "true gradients (value_and_grad, or LossScaleOptimizer.scale_loss)"
SCALED_GRADIENTS = "scaled gradients (scale, scale_loss, or scale_loss(unscale=False))"


class LossScale:
    """The state, what a step and an update write to it, its settings, and saving.

    Also what is fixed for life: the way in which gradients come, and the group and
    the optimizer that it belongs to.

    Args:
        values (dict): The fields of :mod:`mlx_gradscale.scale`, or some of them.
        enabled (bool): Whether it does anything.
        group (mx.distributed.Group, optional): Who decides together.
    """

    def __init__(
        self,
        values: dict[str, Any],
        enabled: bool,
        group: mx.distributed.Group | None,
    ):
        if not isinstance(enabled, (bool, np.bool_)):
            raise TypeError(f"enabled must be True or False, got {enabled!r}.")
        check(values)
        self._enabled = bool(enabled)
        self._group = group
        self._way: str | None = None
        #: Warns after too many skipped steps in a row; another alarm, or None.
        self.skip_alarm: SkipAlarm | None = SkipAlarm()
        self._state: dict[str, Any] = {}
        self._begin_iterations()
        values = {name: values.get(name, FIELDS[name][1]) for name in FIELDS}
        compare_scalers("GradScaler()", self, values)
        self._fill(values)

    def _begin_iterations(self) -> None:
        # What a copy does not take over: it has no models, and nobody has it.
        self._owner: weakref.ref[Any] | None = None
        self._warned: set[str] = set()
        self.forward = Forward(
            self._state, self._check_loss, self._begin_gradient, self.warn_once
        )

    def _begin_gradient(self, model: nn.Module) -> None:
        """Is told each model that is about to be differentiated."""

    def _fill(self, values: dict[str, Any]) -> None:
        for name, value in values.items():
            self._state[name] = as_array(name, value)
        # Evaluated here: an array made on one thread cannot be on another.
        mx.eval(self._state)
        self._only_guards = values["scale"] == 1 and not values["dynamic"]

    @property
    def state(self) -> dict[str, Any]:
        """The dict of arrays to list in ``mx.compile(inputs=..., outputs=...)``."""
        return self._state

    # Whose it is, and what its gradients are

    @property
    def group(self) -> mx.distributed.Group | None:
        """The ranks that decide together, None where each decides for itself."""
        return self._group

    @property
    def owner(self) -> Any:
        """The ``LossScaleOptimizer`` that moves the scale, None without one."""
        return self._owner() if self._owner is not None else None

    def belong_to(self, optimizer: Any) -> None:
        """Be moved by one ``LossScaleOptimizer`` from now on."""
        self._owner = weakref.ref(optimizer)

    def take_way(self, way: str) -> None:
        """Decide once how this scaler's gradients come, or raise if it is decided."""
        if self._way not in (None, way):
            raise RuntimeError(
                f"This scaler has given {self._way} already, and step() could not tell "
                f"them from {way}: make another scaler for these."
            )
        self._way = way

    @property
    def gives_true_gradients(self) -> bool:
        """Whether gradients are to be taken as they are."""
        if not self._enabled or self._way == TRUE_GRADIENTS:
            return True
        return self._way is None and self._only_guards

    @property
    def has_no_gradients(self) -> bool:
        """Whether no gradient can have come from here, and one should have."""
        return self._way is None and not self._only_guards

    def check_model(self, model: nn.Module) -> None:
        """Raise if true gradients of this model cannot have come from here."""
        if self._way == TRUE_GRADIENTS and not self.forward.knows(model):
            raise ValueError(
                "These are gradients of a model that value_and_grad() was not made "
                "for and that scale_loss() has not seen: pass the same model, or name "
                "it, as scale_loss(loss_fn, model)."
            )

    def _check_loss(self, loss: mx.array) -> mx.array:
        if loss.dtype == mx.float16 and not self._only_guards:
            self.warn_once(
                "The loss is float16, so its gradient starts at the scale cast to "
                "float16, where everything above 65504 is inf: steps are skipped "
                "until the scale is below that. Reduce the loss in float32, for "
                "example with logits.astype(mx.float32)."
            )
        return scaled_once(loss)

    def warn_once(self, message: str) -> None:
        """Warn at the user's line, if this was not said before."""
        if message not in self._warned:
            self._warned.add(message)
            warn_user(message)

    # What a step and an update write

    def inverse(self) -> mx.array:
        """Return what to multiply scaled gradients with."""
        return 1.0 / self._field("scale")

    def after_step(
        self, grads: Any, applied: mx.array, loss_finite: mx.array, update: bool
    ) -> Writes:
        """Return what a step writes to the state.

        Args:
            grads (Any): Noted for the alarm's table, without keeping them alive.
            applied (array): A 0-d bool array.
            loss_finite (array): The state's own, or what a group agreed on.
            update (bool): Whether the scale moves with it.
        """
        if self.skip_alarm is not None:
            self.skip_alarm.remember(grads)
        fields = self._fields() | {"loss_finite": loss_finite}
        changed = count_step(fields, applied) | {"loss_finite": loss_finite}
        if update:
            changed |= next_scale(self._fields() | changed, applied, True)
        return self._writes(changed)

    def after_update(
        self, finite: mx.array, loss_finite: mx.array, steps: int
    ) -> Writes:
        """Return what an update writes to the state: the scale and its trackers.

        Args:
            finite (array): Whether all was, in all steps since the last update.
            loss_finite (array): The state's own, or what a group agreed on.
            steps (int): How many steps there were.
        """
        fields = self._fields() | {"loss_finite": loss_finite}
        return self._writes(next_scale(fields, finite, steps == 1))

    def _fields(self) -> dict[str, mx.array]:
        return {name: self._state[name] for name in FIELDS}

    def _field(self, name: str) -> mx.array:
        field: mx.array = self._state[name]
        return field

    def _writes(self, changed: dict[str, mx.array]) -> Writes:
        return [(self._state, *item) for item in changed.items()]

    # Settings

    def get_scale(self) -> float:
        """Read the scale from the device; 1.0 when disabled.

        This is also where too many skipped steps in a row are noticed: see
        :class:`mlx_gradscale.diagnostics.SkipAlarm`, or set ``skip_alarm`` to None.
        """
        if not self._enabled:
            return 1.0
        check_skips(self)
        return float(self._state["scale"].item())

    def is_enabled(self) -> bool:
        """Tell whether the scaler does anything."""
        return self._enabled

    def get_growth_factor(self) -> float:
        """Read the growth factor."""
        return float(self._get("growth_factor"))

    def set_growth_factor(self, new_factor: float) -> None:
        """Set the growth factor, also for a step that is already compiled.

        Example:
            >>> from mlx_gradscale import GradScaler
            >>> scaler = GradScaler()
            >>> scaler.set_growth_factor(1.5)
            >>> scaler.get_growth_factor()
            1.5
        """
        self._set("growth_factor", new_factor)

    def get_backoff_factor(self) -> float:
        """Read the backoff factor."""
        return float(self._get("backoff_factor"))

    def set_backoff_factor(self, new_factor: float) -> None:
        """Set the backoff factor, also for a step that is already compiled."""
        self._set("backoff_factor", new_factor)

    def get_growth_interval(self) -> int:
        """Read the growth interval."""
        return int(self._get("growth_interval"))

    def set_growth_interval(self, new_interval: int) -> None:
        """Set the growth interval, also for a step that is already compiled."""
        self._set("growth_interval", new_interval)

    def get_backoff_interval(self) -> int:
        """Read how many overflows in a row it takes to back off."""
        return int(self._get("backoff_interval"))

    def set_backoff_interval(self, new_interval: int) -> None:
        """Set the backoff interval, also for a step that is already compiled."""
        self._set("backoff_interval", new_interval)

    def get_hysteresis(self) -> int:
        """Read how many overflows between two growths it takes to back off."""
        return int(self._get("hysteresis"))

    def set_hysteresis(self, new_hysteresis: int) -> None:
        """Set the hysteresis, also for a step that is already compiled."""
        self._set("hysteresis", new_hysteresis)

    def is_dynamic(self) -> bool:
        """Tell whether the scale moves."""
        return bool(self._get("dynamic"))

    def set_dynamic(self, dynamic: bool) -> None:
        """Let the scale move, or hold it, also in a step that is already compiled."""
        self._set("dynamic", dynamic)
        self._only_guards &= not dynamic

    def _get(self, name: str) -> Any:
        return read_field(name, self._state[name])

    def _set(self, name: str, value: Any) -> None:
        check({name: value})
        check({key: self._get(key) for key in SETTINGS if key != name} | {name: value})
        self._state[name] = as_array(name, value)

    @property
    def skipped_steps(self) -> mx.array:
        """How many steps changed nothing, as a lazy 0-d array."""
        return self._field("skipped_steps")

    @property
    def skipped_losses(self) -> mx.array:
        """How many of them because the loss itself was not finite, lazily.

        The scale stays where it is then: no scale cures a loss that is NaN. Counted
        where the loss is seen: by ``value_and_grad`` and by a ``LossScaleOptimizer``.
        """
        return self._field("skipped_losses")

    @property
    def consecutive_skips(self) -> mx.array:
        """How many of the latest updates in a row had a skipped step, lazily.

        Example:
            >>> from mlx_gradscale import GradScaler
            >>> GradScaler().consecutive_skips
            array(0, dtype=int32)
        """
        return self._field("consecutive_skips")

    @property
    def last_step_applied(self) -> mx.array:
        """Whether the latest step changed something, lazily."""
        return self._field("last_step_applied")

    def assert_in_sync(self, group: mx.distributed.Group | None = None) -> None:
        """Raise, on every rank, if this scaler is not in the same state on all.

        See :func:`mlx_gradscale.distributed.assert_in_sync`, which says which rank
        differs in what.

        Args:
            group (mx.distributed.Group, optional): Default: the scaler's own group,
                else the global one.
        """
        distributed.assert_in_sync(self._fields(), group or self._group)

    # Saving

    def state_dict(self) -> dict[str, Any]:
        """Return PyTorch's five keys, and others only where not at their default.

        Example:
            >>> from mlx_gradscale import GradScaler
            >>> GradScaler(growth_factor=1.5).state_dict()["growth_factor"]
            1.5
        """
        if not self._enabled:
            return {}
        return to_state_dict(read(self._state))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a state dict of this class or of PyTorch's, or raise.

        Trackers and tallies that the dict does not have start at zero; settings of
        this package that it does not have stay as they were constructed. Other
        keys are ignored. Nothing is changed if anything is wrong.

        Example:
            >>> from mlx_gradscale import GradScaler
            >>> scaler = GradScaler()
            >>> scaler.load_state_dict(GradScaler(init_scale=512.0).state_dict())
            >>> scaler.get_scale()
            512.0
        """
        if not self._enabled:
            return
        settings = {name: self._get(name) for name in SETTINGS}
        values = from_state_dict(state_dict, settings)
        compare_scalers("load_state_dict()", self, values)
        self._fill(values)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the state dict to one file, atomically.

        Args:
            path (str): Ends in ``.json``, ``.safetensors`` or ``.pt``; ``.json.gz``
                and ``.pt.gz`` are compressed.

        Example:
            >>> import os, tempfile
            >>> from mlx_gradscale import GradScaler
            >>> path = os.path.join(tempfile.mkdtemp(), "scaler.pt")
            >>> GradScaler(init_scale=512.0).save(path)
            >>> scaler = GradScaler()
            >>> scaler.load(path)
            >>> scaler.get_scale()
            512.0
        """
        files.save_state(path, self.state_dict())

    def load(self, path: str | os.PathLike[str]) -> None:
        """Load what :meth:`save` wrote, or a scaler state that PyTorch saved."""
        self.load_state_dict(files.load_state(path))

    def __repr__(self) -> str:
        if not self._enabled:
            return f"{type(self).__name__}(enabled=False)"
        try:
            values = read(self._state)
        except (RuntimeError, ValueError):  # inside mx.compile they have no values
            return f"{type(self).__name__}(being traced)"
        changed = [
            f"{name}={values[name]}"
            for name, (_, default) in SETTINGS.items()
            if values[name] != default
        ]
        scale = f"scale={values['scale']}"
        skipped = f"skipped_steps={values['skipped_steps']}"
        return f"{type(self).__name__}({', '.join([scale, *changed, skipped])})"

    def __getstate__(self) -> dict[str, Any]:
        if self._group is not None:
            raise TypeError(
                "A GradScaler with a group cannot be pickled or copied: save its "
                "state_dict() and make a new one with the group."
            )
        own = {"_state": read(self._state), "_owner": None, "forward": None}
        return vars(self) | own

    def __setstate__(self, pickled: dict[str, Any]) -> None:
        vars(self).update(pickled, _state={})
        self._begin_iterations()
        self._fill(pickled["_state"])
