"""The loss scale as an object: its state, its settings, its tallies, and saving."""

import os
import weakref
from typing import Any

import mlx.core as mx
import numpy as np

from . import distributed
from . import state_files as files
from .diagnostics.alarm import SkipAlarm, check_skips
from .distributed.agreement import compare_scalers
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


class LossScale:
    """What a ``GradScaler`` and a ``LossScaleOptimizer`` both stand on.

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
        # The LossScaleOptimizer that moves the scale, if there is one.
        self._owner: weakref.ref | None = None
        #: Warns after too many skipped steps in a row; another alarm, or None.
        self.skip_alarm: SkipAlarm | None = SkipAlarm()
        self._state: dict[str, Any] = {}
        values = {name: values.get(name, FIELDS[name][1]) for name in FIELDS}
        compare_scalers("GradScaler()", self, values)
        self._fill(values)

    def _fill(self, values: dict[str, Any]) -> None:
        for name, value in values.items():
            self._state[name] = as_array(name, value)
        # Evaluated here: an array made on one thread cannot be on another.
        mx.eval(self._state)

    @property
    def state(self) -> dict[str, Any]:
        """The dict of arrays to list in ``mx.compile(inputs=..., outputs=...)``."""
        return self._state

    def inverse(self) -> mx.array | None:
        """Return what to multiply scaled gradients with, None when disabled."""
        return 1.0 / self._state["scale"] if self._enabled else None

    def after_step(
        self, applied: mx.array, loss_finite: mx.array
    ) -> dict[str, mx.array]:
        """Return what one step changes in the state: the tallies.

        ``loss_finite`` is the state's own, or what a group agreed on.
        """
        fields = self._fields() | {"loss_finite": loss_finite}
        return count_step(fields, applied) | {"loss_finite": loss_finite}

    def after_update(
        self, finite: mx.array, changed: dict[str, mx.array], steps: int = 1
    ) -> dict[str, mx.array]:
        """Return what one update changes in the state: the scale and its trackers.

        ``changed`` is what the state does not have yet: ``loss_finite``, or all that
        :meth:`after_step` returned; ``steps`` is how many there were.
        """
        return next_scale(self._fields() | changed, finite, steps == 1)

    def _fields(self) -> dict[str, mx.array]:
        return {name: self._state[name] for name in FIELDS}

    # Settings

    def get_scale(self) -> float:
        """Read the scale from the device; 1.0 when disabled.

        This is also where too many skipped steps in a row are noticed: see
        :class:`mlx_gradscale.diagnostics.SkipAlarm`, or set ``skip_alarm`` to None.
        """
        if not self._enabled:
            return 1.0
        check_skips(self)
        return self._state["scale"].item()

    def is_enabled(self) -> bool:
        """Tell whether the scaler does anything."""
        return self._enabled

    def get_growth_factor(self) -> float:
        """Read the growth factor."""
        return self._get("growth_factor")

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
        return self._get("backoff_factor")

    def set_backoff_factor(self, new_factor: float) -> None:
        """Set the backoff factor, also for a step that is already compiled."""
        self._set("backoff_factor", new_factor)

    def get_growth_interval(self) -> int:
        """Read the growth interval."""
        return self._get("growth_interval")

    def set_growth_interval(self, new_interval: int) -> None:
        """Set the growth interval, also for a step that is already compiled."""
        self._set("growth_interval", new_interval)

    def get_backoff_interval(self) -> int:
        """Read how many overflows in a row it takes to back off."""
        return self._get("backoff_interval")

    def set_backoff_interval(self, new_interval: int) -> None:
        """Set the backoff interval, also for a step that is already compiled."""
        self._set("backoff_interval", new_interval)

    def get_hysteresis(self) -> int:
        """Read how many overflows between two growths it takes to back off."""
        return self._get("hysteresis")

    def set_hysteresis(self, new_hysteresis: int) -> None:
        """Set the hysteresis, also for a step that is already compiled."""
        self._set("hysteresis", new_hysteresis)

    def is_dynamic(self) -> bool:
        """Tell whether the scale moves."""
        return self._get("dynamic")

    def set_dynamic(self, dynamic: bool) -> None:
        """Let the scale move, or hold it, also in a step that is already compiled."""
        self._set("dynamic", dynamic)

    def _get(self, name: str) -> Any:
        return read_field(name, self._state[name])

    def _set(self, name: str, value: Any) -> None:
        check({name: value})
        check({key: self._get(key) for key in SETTINGS if key != name} | {name: value})
        self._state[name] = as_array(name, value)

    @property
    def skipped_steps(self) -> mx.array:
        """How many steps changed nothing, as a lazy 0-d array."""
        return self._state["skipped_steps"]

    @property
    def skipped_losses(self) -> mx.array:
        """How many of them because the loss itself was not finite, lazily.

        The scale stays where it is then: no scale cures a loss that is NaN. Counted
        where the loss is seen: by ``value_and_grad`` and by a ``LossScaleOptimizer``.
        """
        return self._state["skipped_losses"]

    @property
    def consecutive_skips(self) -> mx.array:
        """How many of the latest updates in a row had a skipped step, lazily.

        Example:
            >>> from mlx_gradscale import GradScaler
            >>> GradScaler().consecutive_skips
            array(0, dtype=int32)
        """
        return self._state["consecutive_skips"]

    @property
    def last_step_applied(self) -> mx.array:
        """Whether the latest step changed something, lazily."""
        return self._state["last_step_applied"]

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

    def save(self, path: str | os.PathLike) -> None:
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

    def load(self, path: str | os.PathLike) -> None:
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
