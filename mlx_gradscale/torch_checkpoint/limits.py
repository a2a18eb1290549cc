"""The error of this package's reader, and the bounds it holds a file to."""

from dataclasses import dataclass


class CheckpointError(ValueError):
    """A file is not a PyTorch checkpoint that can be read, and why.

    Raised for damaged, hostile and unsupported files alike. Trouble with the file
    system (a missing file, no permission) stays an ``OSError``.
    """


class CutOffError(CheckpointError):
    """A pickle goes on beyond the bytes it was given."""


@dataclass(frozen=True)
class Limits:
    """How much a file may ask for; every bound is far above real checkpoints.

    Args:
        opcodes (int): Pickle instructions; those that make a dict or a set count
            four times. A tensor takes about 40, so the default is room for some
            200,000 tensors, and a file made of nothing but empty containers costs
            at most 1 GB (100 bytes an instruction).
        memo (int): Objects the pickle may refer back to.
        depth (int): Containers inside containers.
        nodes (int): Values in the object when everything shared is written out:
            forty lists, each holding the previous one twice, are 2**40 values.
        pickle_bytes (int): Size of the pickle, and of the zip directory, which are
            held in memory. A text can take four times its bytes there.
        records (int): Records in the zip file; each storage is one.
        hard_keys (int): Tuples and complex numbers as dict keys or set members;
            their hashes can be made to collide, and collisions cost their square.
        extra_bytes (int): All tensors together may hold four times the file's size
            and this much more. Only views that repeat or overlap elements, such as
            expanded tensors, get near it.
    """

    opcodes: int = 10_000_000
    memo: int = 4_000_000
    depth: int = 128
    nodes: int = 10_000_000
    pickle_bytes: int = 2**26
    records: int = 1_000_000
    hard_keys: int = 4096
    extra_bytes: int = 2**30


DEFAULT_LIMITS = Limits()
