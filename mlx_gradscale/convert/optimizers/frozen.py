"""Parameters that PyTorch's optimizer was given and never moved."""

from collections.abc import Container, Mapping

import mlx.core as mx

from ..layouts import Entry
from .record import OptimizerRecord
from .table import ROWS


def without_frozen(
    flat: Mapping[str, mx.array],
    record: OptimizerRecord,
    entries: Mapping[str, Entry],
    trainable: Container[str],
) -> tuple[dict[str, mx.array], list[str]]:
    """Leave out the state of parameters that had none in PyTorch and need none.

    Args:
        flat (dict): ``tree_flatten(optimizer.state)`` as a dict.
        record (OptimizerRecord): From :func:`to_mlx`.
        entries (dict): PyTorch name -> where it is in MLX.
        trainable (Container): Names of the MLX model's parameters that are not frozen.

    Returns:
        tuple: The state, and those MLX names that had none in PyTorch but are
        trainable here, where others had one.
    """
    out, suspects = dict(flat), []
    count = sum(map(len, record.names))
    slots = ROWS[record.name].slots.values()
    for i, names in enumerate(record.names):
        prefix = record.prefix(i)
        for name in (n for t in names if t in record.fresh for n in entries[t].mlx):
            held = [f"{prefix}{name}.{slot}" for slot in slots]
            if any(mx.any(flat[key]).item() for key in held if key in flat):
                continue  # it was trained in MLX since
            if name in trainable:
                suspects.append(name)
            else:
                for key in held:
                    out.pop(key, None)
    is_telling = any(record.steps) and len(record.fresh) < count
    return out, suspects if is_telling else []
