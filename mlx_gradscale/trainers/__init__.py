"""The mlx-lm command, ``mlx_gradscale lora``."""
