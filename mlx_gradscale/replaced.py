"""Names of somebody else's module, replaced for a while."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

_ABSENT = object()


@contextmanager
def replaced(module: ModuleType, **values: Any) -> Iterator[None]:
    """Give names of a module other values, and the old ones back afterwards.

    Args:
        module (ModuleType): Whose names.
        **values (Any): By name. A name that the module does not have is one that it
            takes from Python's own, as ``range``.

    Example:
        >>> import math
        >>> with replaced(math, pi=3):
        ...     math.pi
        3
        >>> math.pi > 3.1
        True
    """
    before = {name: vars(module).get(name, _ABSENT) for name in values}
    try:
        for name, value in values.items():
            setattr(module, name, value)
        yield
    finally:
        for name, value in before.items():
            if value is _ABSENT:
                vars(module).pop(name, None)
            else:
                setattr(module, name, value)
