"""Small messages between ranks, that notice a rank which is somewhere else."""

import hashlib
import json
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np

from .consensus import Group

# How many seconds a rank waits for the others before it raises. MLX itself waits for
# ever. Ranks may load for minutes before they meet, so this is long.
PATIENCE = 600.0

_LISTED = 8

# First in each message. NaN in every floating dtype, and no number of flags: a rank
# that is in the middle of a step takes it for an overflow and skips that step.
_MARK = np.full(8, 0x7FFF, "<u2").tobytes()
_DIGEST_BYTES = 16

_SAME_CALLS = (
    "Every rank of the group must make the same calls in the same order, and take the "
    "same number of steps. Start all ranks again: what they say now is out of step."
)


def gather(call: str, value: Any, group: Group) -> list[Any]:
    """Return what JSON can say, of every rank, on every rank.

    One all-gather of 40 bytes where all say the same, a second one for the rest.

    Args:
        call (str): What the user called, for the errors.
        value (Any): What this rank has to say.
        group (Group): Two ranks or more.

    Raises:
        RuntimeError: Another rank is not at this call.
        TimeoutError: Another rank said nothing for ``PATIENCE`` seconds.
    """
    text = json.dumps([call, value]).encode()
    digest = hashlib.blake2b(text, digest_size=_DIGEST_BYTES).digest()
    header = _MARK + len(text).to_bytes(8, "little") + digest
    headers = _all_gather(call, header, group)
    for rank, other in enumerate(headers):
        if not other.startswith(_MARK):
            raise RuntimeError(
                f"Rank {group.rank()} is at {call}, and rank {rank} is not: it sent "
                f"other bytes. {_SAME_CALLS}"
            )
    if headers.count(header) == len(headers):
        return [value] * len(headers)
    lengths = [
        int.from_bytes(h[len(_MARK) : -_DIGEST_BYTES], "little") for h in headers
    ]
    rows = _all_gather(call, text.ljust(max(lengths)), group)
    said = [json.loads(row[:n]) for row, n in zip(rows, lengths, strict=True)]
    for rank, (other_call, _) in enumerate(said):
        if other_call != call:
            raise RuntimeError(
                f"Rank {group.rank()} is at {call}, rank {rank} at {other_call}. "
                f"{_SAME_CALLS}"
            )
    return [value for _, value in said]


def check_equal(
    call: str,
    table: dict[str, Any],
    group: Group,
    text: Callable[[Any], str],
    advice: str,
) -> None:
    """Raise, on every rank, if an entry of ``table`` is not the same on all ranks.

    Args:
        call (str): What the user called, for the errors.
        table (dict): What JSON can say, by name.
        group (Group): Two ranks or more.
        text (Callable): How an entry is shown; None where a rank has none.
        advice (str): The last sentence of the error.

    Raises:
        RuntimeError: Says which rank differs from most others, and in what.
    """
    tables = gather(call, table, group)
    lines = []
    for name in dict.fromkeys(name for table in tables for name in table):
        values = [table.get(name) for table in tables]
        usual = _most_common(values)
        lines += [
            f"Rank {rank} differs in {name!r}: it has {text(value)}, rank "
            f"{values.index(usual)} has {text(usual)}."
            for rank, value in enumerate(values)
            if value != usual
        ]
    if lines:
        more = len(lines) - _LISTED
        lines = lines[:_LISTED] + [f"There are {more} more."] * (more > 0)
        raise RuntimeError("\n".join([*lines, advice]))


def _most_common(values: list[Any]) -> Any:
    # Of equally common ones this is the first counted: the lowest rank's.
    return json.loads(Counter(map(json.dumps, values)).most_common(1)[0][0])


def _all_gather(call: str, data: bytes, group: Group) -> list[bytes]:
    mine = mx.array(np.frombuffer(data, np.uint8).reshape(1, -1))
    gathered = mx.distributed.all_gather(mine, group=group)
    # Started here, on this thread's stream, after what is on its way there.
    mx.async_eval(gathered)
    _wait(call, gathered, group)
    return [row.tobytes() for row in np.array(gathered)]


def _wait(call: str, x: mx.array, group: Group) -> None:
    errors: list[BaseException] = []

    def wait() -> None:
        try:
            mx.eval(x)
        except BaseException as error:
            errors.append(error)

    # MLX's own waiting has no end. If this one does not end either, it is left behind,
    # and the process can still exit.
    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()
    waiting.join(PATIENCE)
    if waiting.is_alive():
        raise TimeoutError(
            f"Rank {group.rank()} waited {PATIENCE:g} seconds at {call} for the other "
            f"ranks. {_SAME_CALLS}"
        )
    for error in errors:
        raise error
