"""What to say where a state dict and an MLX model do not have the same names."""

import re
from collections.abc import Iterable

_REST = (
    "The optimizer's state is then of the old parameters: leave it out "
    "(--optimizer-key '')."
)
# What PyTorch keeps instead of a plain weight, and what to do about it.
_REWRITTEN = {
    r"(^|\.)parametrizations\.": "Parametrized weights are not converted: in PyTorch "
    "call torch.nn.utils.parametrize.remove_parametrizations(module, 'weight') before "
    f"saving. {_REST}",
    r"\w_orig$": "Weights that are pruned or have a spectral norm are not converted: "
    "in PyTorch call torch.nn.utils.prune.remove(module, 'weight'), or "
    f"torch.nn.utils.remove_spectral_norm(module), before saving. {_REST}",
    r"(weight|bias)_[ih]h_l\d": "PyTorch's recurrent layers (RNN, LSTM, GRU) have two "
    "biases where MLX's have one, and are not converted: set their weights in MLX by "
    "hand, and convert the rest with --drop and an MLX model without them.",
}
_WEIGHT_NORM = (
    "Weights with a weight norm are not converted: in PyTorch call "
    f"torch.nn.utils.remove_weight_norm(module) before saving. {_REST}"
)


def mismatch(lost: list[str], missing: list[str]) -> str:
    """Return the sentences of an error.

    Args:
        lost (list): PyTorch names that have no place in the MLX model.
        missing (list): MLX names that nothing was found for.

    Example:
        >>> mismatch(["net.w"], ["w"])
        "The MLX model has no place for net.w; the checkpoint lacks the model's w. \
If 'net.' is only a wrapper, rename it away: rename=... (--rename '^net\\\\.=')."
    """
    said = []
    if lost:
        said.append(f"The MLX model has no place for {listed(lost)}")
    if missing:
        said.append(f"the checkpoint lacks the model's {listed(missing)}")
    text = "; ".join(said)
    hint = _rewritten(lost) or _wrapped(lost, missing)
    hint = hint or "Give names with rename=... (--rename), or drop tensors (--drop)."
    return f"{text[0].upper()}{text[1:]}. {hint}"


def listed(names: Iterable[str], most: int = 8) -> str:
    """Return names for a sentence, the first few of many.

    Example:
        >>> listed("abc", most=2)
        'a, b and 1 more'
    """
    names = list(names)
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _rewritten(lost: list[str]) -> str | None:
    for pattern, hint in _REWRITTEN.items():
        if any(re.search(pattern, name) for name in lost):
            return hint
    pairs = {name[:-2] for name in lost if name.endswith("_g")}
    return _WEIGHT_NORM if any(f"{stem}_v" in lost for stem in pairs) else None


def _wrapped(lost: list[str], missing: list[str]) -> str | None:
    prefix = lost[0].split(".", 1)[0] + "." if lost and "." in lost[0] else ""
    if not (missing and prefix and all(name.startswith(prefix) for name in lost)):
        return None
    if any(name.startswith(prefix) for name in missing):
        return None  # the model has it, too
    return (
        f"If {prefix!r} is only a wrapper, rename it away: rename=... "
        f"(--rename '^{re.escape(prefix)}=')."
    )
