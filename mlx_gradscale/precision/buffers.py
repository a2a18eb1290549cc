"""Take back, on a skipped step, what the forward pass wrote to the model.

BatchNorm's running statistics are the usual case: a forward pass that overflows would
leave them inf or NaN for good. What they were before is kept in the scaler's state,
not in Python, because the forward pass and the step may be in different traces.
"""

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from .differentiation import Found, arrays_of, ids_of_trained

# (container, key, array) by path, for the arrays of a model that are not trained.
Places = dict[str, tuple[Any, Any, mx.array]]


def places(model: nn.Module) -> Places:
    """Return where the arrays are that are not trained, and which ones they are now."""
    return untrained(arrays_of(model), ids_of_trained(model.trainable_parameters()))


def untrained(found: list[Found], trained: set[int]) -> Places:
    """Return :func:`places` from what is known of a model.

    Not those that are trained: a checkpointed layer puts others in their place, and a
    step writes them itself.

    Args:
        found (list): :func:`arrays_of` the model.
        trained (set): :func:`ids_of_trained` arrays.
    """
    return {
        ".".join(map(str, path)): (box, key, x)
        for path, box, key, x in found
        if id(x) not in trained
    }


def known_buffers(model: nn.Module) -> dict[str, mx.array]:
    """Return the arrays that a forward pass is known to write: running statistics.

    Others are found when a forward pass writes them, at the price of a second trace.
    """
    return {
        f"{path}.{key}" if path else key: module[key]
        for path, module in model.named_modules()
        if isinstance(module, nn.BatchNorm)
        for key in ("running_mean", "running_var")
        if key in module
    }


def empty_backup(model: nn.Module) -> dict[str, Any]:
    """Return the part of a scaler's state that a model's buffers need."""
    return {"pending": mx.array(False), "before": known_buffers(model)}


def back_up(backup: dict[str, Any], before: Places) -> None:
    """Note what a forward pass has overwritten, unless an earlier one noted it.

    Args:
        backup (dict): Of :func:`empty_backup`; written in place.
        before (dict): :func:`places` of the model before the forward pass.
    """
    kept, pending = backup["before"], backup["pending"]
    # Not a cache that grew: there is nothing to select from.
    written = {
        path
        for path, (box, key, old) in before.items()
        if box[key] is not old and _alike(box[key], old)
    }
    if not written:
        return
    for path, (_, _, old) in before.items():
        if path not in written and path not in kept:
            continue
        # The first pass since the last step: what it found is what to go back to.
        known = path in kept and _alike(kept[path], old)
        kept[path] = mx.where(pending, kept[path], old) if known else old
    # Computed, because MLX before 0.32 cannot compile what returns a constant.
    backup["pending"] = pending | True


def _alike(a: Any, b: mx.array) -> bool:
    return isinstance(a, mx.array) and (a.shape, a.dtype) == (b.shape, b.dtype)


def taken_back(
    backup: dict[str, Any], model: nn.Module, applied: mx.array
) -> list[tuple[Any, Any, Any]]:
    """Return what to write, as (container, key, value), so that a skip changes nothing.

    Args:
        backup (dict): Of the model.
        model (nn.Module): The model after the forward pass.
        applied (array): A 0-d bool array, False where the step is skipped.
    """
    now = places(model)
    keep = applied | mx.logical_not(backup["pending"])
    writes: list[tuple[Any, Any, Any]] = [
        (backup, "pending", backup["pending"] & False)
    ]
    for path, old in backup["before"].items():
        place: tuple[Any, Any, Any] = now.get(path, (None, None, None))
        box, key, new = place
        if _alike(new, old):
            writes.append((box, key, mx.where(keep, new, old)))
    return writes
