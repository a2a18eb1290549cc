"""Names of PEFT's LoRA adapters, and mlx-lm's for the same."""

import re

# base_model.model.<path>.lora_A[.<adapter>].weight
_ADAPTER = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_([AB])(?:\.\w+)?\.weight")


def from_peft(name: str) -> tuple[str, str | None]:
    """Return mlx-lm's name, and the layout, of what may be one of PEFT's tensors.

    PEFT has A as (rank, in) and B as (out, rank), mlx-lm (in, rank) and (rank, out).

    Args:
        name (str): As PEFT saves it, or any other, which stays as it is.

    Example:
        >>> from_peft("base_model.model.layers.0.q_proj.lora_A.weight")
        ('layers.0.q_proj.lora_a', 'transpose')
        >>> from_peft("layers.0.q_proj.weight")
        ('layers.0.q_proj.weight', None)
    """
    found = _ADAPTER.fullmatch(name)
    if found is None:
        return name, None
    return f"{found[1]}.lora_{found[2].lower()}", "transpose"
