"""The table: how each framework names a scaler's state."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ..scale import FIELDS, TORCH_KEYS

# This package's own keys, with the value at which they say nothing.
OWN_DEFAULTS = {
    key: default
    for key, (_, default) in FIELDS.items()
    if key not in TORCH_KEYS.values()
}
TYPES = {key: type(FIELDS[field][1]) for key, field in TORCH_KEYS.items()} | {
    key: type(default) for key, default in OWN_DEFAULTS.items()
}


def _deepspeed(state: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    # DeepSpeed grows where (cur_iter - last_overflow_iter - 1) is a positive
    # multiple of the window: window + 1 finite steps after an overflow, then
    # every window steps. The tracker is what PyTorch's rule needs to grow next at
    # the same step; right after an overflow that would be -1, so 0.
    factor, window = found["growth_factor"], found["growth_interval"]
    since = int(state["cur_iter"]) - int(state.get("last_overflow_iter", -1)) - 1
    return {
        "backoff_factor": 1.0 / factor,
        "_growth_tracker": (since - 1) % window if since > 0 else 0,
        **_hysteresis("cur_hysteresis", state, found),
    }


def _megatron(state: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    return _hysteresis("hysteresis_tracker", state, found)


def _hysteresis(
    key: str, state: dict[str, Any], found: dict[str, Any]
) -> dict[str, Any]:
    # They count down what is left of the budget, here it is counted up what is used.
    # Nothing is left where a state does not say it.
    left = state.get(key)
    if left is None:
        return {"hysteresis": 1}
    used = found["hysteresis"] - int(left)
    return {"backoff_tracker": min(max(used, 0), found["hysteresis"])}


@dataclass(frozen=True)
class Format:
    """One row of the table.

    Attributes:
        marks (frozenset): The keys that tell this format from the others.
        fields (dict): Our key -> its key.
        assumed (dict): Our key -> the framework's default, for what its state does not
            (or need not) carry.
        lost (dict): Its key -> why that key has no counterpart here.
        after (Callable or None): Computes the keys that are not a plain copy.
        writes (bool): Whether :func:`write_state` can write it.
        shape (tuple or None): Shape of the written ``scale`` array; None for a Python
            float.
    """

    marks: frozenset[str]
    fields: dict[str, str]
    assumed: dict[str, Any] = field(default_factory=dict)
    lost: dict[str, str] = field(default_factory=dict)
    after: Callable[[dict[Any, Any], dict[Any, Any]], dict[Any, Any]] | None = None
    writes: bool = False
    shape: tuple[int, ...] | None = None


USUAL = {"growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000}
# NeMo's, which is apex's rule.
_HYSTERESIS = (
    "is refilled there by every finite step, and the hysteresis of this package, as "
    "Megatron's and DeepSpeed's, by growth: set hysteresis= if you want that"
)

FORMATS: dict[str, Format] = {
    "torch": Format(
        frozenset(TORCH_KEYS),
        {key: key for key in (*TORCH_KEYS, *OWN_DEFAULTS)},
        lost={
            "_hysteresis_tracker": _HYSTERESIS,  # NeMo's, on top of PyTorch's five
            "_hysterisis_tracker": _HYSTERESIS,
        },
        writes=True,
    ),
    "paddle": Format(
        frozenset({"scale", "incr_ratio", "decr_ratio", "incr_count", "decr_count"}),
        {
            "scale": "scale",
            "growth_factor": "incr_ratio",
            "backoff_factor": "decr_ratio",
            "growth_interval": "incr_every_n_steps",
            "_growth_tracker": "incr_count",
            "backoff_interval": "decr_every_n_nan_or_inf",
            "backoff_tracker": "decr_count",
            "dynamic": "use_dynamic_loss_scaling",
        },
        writes=True,
        shape=(1,),
    ),
    "flodl": Format(
        frozenset({"scale", "steps_since_growth"}),
        {"scale": "scale", "_growth_tracker": "steps_since_growth"},
        assumed=USUAL,
        writes=True,
    ),
    "keras": Format(
        frozenset({"dynamic_scale", "step_counter"}),
        {"scale": "dynamic_scale", "_growth_tracker": "step_counter"},
        assumed=USUAL,
    ),
    "tf-keras": Format(
        frozenset({"current_loss_scale", "good_steps"}),
        {"scale": "current_loss_scale", "_growth_tracker": "good_steps"},
        assumed=USUAL | {"min_scale": 1.0},
    ),
    "flax": Format(
        frozenset({"fin_steps", "scale"}),
        {
            "scale": "scale",
            "growth_factor": "growth_factor",
            "backoff_factor": "backoff_factor",
            "growth_interval": "growth_interval",
            "_growth_tracker": "fin_steps",
            "min_scale": "minimum_scale",
        },
        assumed=USUAL,
        # flax grows on the (interval + 1)-th finite step, PyTorch on the
        # interval-th: one more gives the same trajectory.
        after=lambda state, found: {"growth_interval": found["growth_interval"] + 1},
    ),
    "jmp": Format(
        frozenset({"loss_scale", "counter"}),
        {
            "scale": "loss_scale",
            "growth_factor": "factor",
            "growth_interval": "period",
            "_growth_tracker": "counter",
            "min_scale": "min_loss_scale",
        },
        assumed={"growth_factor": 2.0, "growth_interval": 2000, "min_scale": 1.0},
        after=lambda state, found: {"backoff_factor": 1.0 / found["growth_factor"]},
    ),
    "megatron": Format(
        frozenset({"scale", "growth_tracker", "hysteresis_tracker"}),
        {"scale": "scale", "_growth_tracker": "growth_tracker"},
        assumed=USUAL | {"growth_interval": 1000, "min_scale": 1.0, "hysteresis": 2},
        after=_megatron,
    ),
    "apex": Format(
        frozenset({"loss_scale", "unskipped"}),
        {"scale": "loss_scale", "_growth_tracker": "unskipped"},
        assumed=USUAL | {"max_scale": 2.0**24},
    ),
    "deepspeed": Format(
        frozenset({"cur_scale", "cur_iter"}),
        {
            "scale": "cur_scale",
            "growth_factor": "scale_factor",
            "growth_interval": "scale_window",
            "dynamic": "dynamic_loss_scale",
        },
        assumed={
            "growth_factor": 2.0,
            "growth_interval": 1000,
            "dynamic": True,
            "min_scale": 1.0,
            "hysteresis": 2,
        },
        lost={
            "last_overflow_iter": "makes the first growth after an overflow come one "
            "step later there than here",
        },
        after=_deepspeed,
    ),
}
