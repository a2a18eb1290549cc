"""``load``: a PyTorch checkpoint as plain Python values and MLX arrays."""

import os
from collections.abc import Callable
from typing import Any, BinaryIO

import mlx.core as mx

from .legacy_reader import read_legacy
from .limits import DEFAULT_LIMITS, Budget, CheckpointError, Limits
from .source import Source, open_source
from .storages import Contents, StorageReader
from .tree import TreeFinisher, written_limit
from .zip_reader import read_zip


def load(
    file: "str | os.PathLike[str] | bytes | BinaryIO",
    *,
    float64: mx.Dtype | None = None,
    limits: Limits = DEFAULT_LIMITS,
) -> Any:
    """Read a ``.pt`` file that ``torch.save`` wrote, without PyTorch.

    Nothing in the file is imported or run. Each tensor becomes an ``mx.array``;
    tensors that share a storage share memory, and the same tensor twice is the same
    array twice. A ``Parameter`` is its array, a ``torch.Size`` a tuple, a
    ``torch.dtype`` or ``torch.device`` its name, as in ``"torch.float16"`` or
    ``"cuda:0"``. ``requires_grad`` and Python attributes of tensors are left behind. A
    ``state_dict``'s ``_metadata`` stays on its ``OrderedDict``. An object of any other
    class becomes a ``Placeholder``, which ``save`` writes as it was; ``plain_value``
    tells what it means where that is known (``argparse.Namespace``, numpy, paths).

    Args:
        file (str, PathLike, bytes or file): A path, the bytes of a file, or a
            seekable binary file object, read from where it stands to its end.
        float64 (Dtype, optional): What double precision becomes. MLX computes it
            only on the CPU, so by default a float64 tensor is an error that names
            it; ``mx.float32`` rounds (complex128 to complex64), ``mx.float64`` keeps.
        limits (Limits, optional): How much a file may ask for.

    Returns:
        The object in the file.

    Raises:
        CheckpointError: The file is damaged, hostile, or holds tensors that MLX does
            not have. Nothing is returned in part.
        OSError: The file cannot be opened or read.

    Example:

        >>> import mlx.core as mx
        >>> from mlx_gradscale import torch_checkpoint
        >>> data = torch_checkpoint.save_bytes({"w": mx.ones((2, 2)), "epoch": 3})
        >>> torch_checkpoint.load(data)["epoch"]
        3
    """
    check_float64(float64)
    return load_within(file, Budget(limits), float64)


def load_within(
    file: "str | os.PathLike[str] | bytes | BinaryIO",
    budget: Budget,
    float64: mx.Dtype | None,
) -> Any:
    """Read a file as :func:`load` does, with what is left of a budget."""
    limits = budget.limits
    with open_source(file) as source:
        read = _format(source)
        found = read(source, budget)
        storages = StorageReader(
            source, found.extents, found.big_endian, float64, limits
        )
        walk = limits, found.shared, written_limit(found.pickle_size, limits)
        # All of the object is checked before any memory is taken for its tensors.
        TreeFinisher(storages.check, *walk, is_check=True).finish(found.value)
        storages.read()
        value = TreeFinisher(storages.tensor, *walk).finish(found.value)
        storages.evaluate()
    return value


def check_float64(dtype: mx.Dtype | None) -> None:
    """Raise unless double precision can become this."""
    # A Dtype cannot be compared with None: it raises TypeError.
    known = isinstance(dtype, mx.Dtype) and dtype in (mx.float32, mx.float64)
    if dtype is not None and not known:
        raise ValueError(
            f"float64 must be None, mx.float32 or mx.float64, not {dtype!r}."
        )


def _format(source: Source) -> Callable[[Source, Budget], Contents]:
    head = source.read(0, min(source.size, 265), "The file")
    if head[:4] == b"PK\x03\x04":
        return read_zip
    if head[257:262] == b"ustar":
        raise CheckpointError(
            "This is a tar file, PyTorch's format before 0.1.10; load it in PyTorch "
            "and save again."
        )
    if head[:1] == b"\x80":
        return read_legacy
    if head[:2] == b"\x1f\x8b":
        raise CheckpointError("This file is compressed by gzip; decompress it first.")
    raise CheckpointError("This is not a file that torch.save() wrote.")
