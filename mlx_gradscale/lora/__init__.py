"""``mlx_gradscale.lora``: mlx-lm's own fine-tuning command, with loss scaling."""

from .command import main

__all__ = ["main"]
