"""Loss scaling inside trainers that build their own loop, mlx-lm's command first."""
