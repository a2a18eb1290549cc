"""Words that wrappers put into the names of a PyTorch model's parameters."""

import re
from collections.abc import Callable, Collection, Iterable

# torch.compile's, FullyShardedDataParallel's and activation checkpointing's are found
# anywhere; nobody else has such names.
_ANYWHERE = r"_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module"
# DistributedDataParallel's may be a module of the user's own, too.
_ALL = re.compile(rf"(^|(?<=\.))(module|{_ANYWHERE})\.")
_PRIVATE = re.compile(rf"(^|(?<=\.))({_ANYWHERE})\.")
_FIRST = "module."
# A LightningModule's usual attribute.
LIGHTNING = "model."
# GPT-2 with a head, in Transformers; the files on the hub are without.
TRANSFORMERS = "transformer."

Rename = Callable[[str], str]


def unwrapped(name: str) -> str:
    """Return a name without the words of all wrappers, wherever they are.

    Example:
        >>> unwrapped("module._orig_mod.blocks.0._fsdp_wrapped_module.weight")
        'blocks.0.weight'
    """
    return _ALL.sub("", name)


def unwrapping(
    names: Iterable[str],
    rename: Rename,
    known: Collection[str] | None = None,
    prefix: str = "",
) -> Rename:
    """Return what makes names the model's own: the user's renames, and no wrappers.

    Args:
        names (Iterable): Of a model's tensors.
        rename (Callable): What the user makes of a name.
        known (Collection, optional): The names that the MLX model knows. A wrapper is
            then what stands between the two.
        prefix (str): Without such names, a beginning that is taken for a wrapper's
            where all names have it.

    Example:
        >>> unwrapping(["module.w", "module.b"], str)("module.w")
        'w'
        >>> unwrapping(["module.w", "head.w"], str)("module.w")
        'module.w'
    """
    names = list(names)
    if known is not None:
        return _fitting(names, rename, known)
    # The user's renames come first: they are written for the names as they are.
    steps: list[Rename] = [lambda name: _PRIVATE.sub("", rename(name))]
    for word in (_FIRST, prefix):
        if word and names and all(steps[-1](n).startswith(word) for n in names):
            last = steps[-1]
            steps.append(_then_without(last, word))
    return steps[-1]


def _then_without(rename: Rename, start: str) -> Rename:
    return lambda name: rename(name).removeprefix(start)


def _fitting(names: list[str], rename: Rename, known: Collection[str]) -> Rename:
    """Return the one of some ways to strip names under which most fit the model."""
    # max takes the first of equals: as little is stripped as need be.
    return max(ways(rename), key=lambda way: sum(way(n) in known for n in names))


def ways(rename: Rename) -> list[Rename]:
    """Return what may stand between PyTorch's names and the model's, least first.

    Example:
        >>> {way("module.model.w") for way in ways(str)} == {
        ...     "module.model.w", "model.w", "w"}
        True
    """
    return [
        rename,
        *(
            made
            for strip in (unwrapped, _without(LIGHTNING), _without(TRANSFORMERS))
            for made in (
                lambda name, strip=strip: strip(rename(name)),
                lambda name, strip=strip: rename(strip(name)),
            )
        ),
    ]


def _without(prefix: str) -> Rename:
    return lambda name: unwrapped(name).removeprefix(prefix)
