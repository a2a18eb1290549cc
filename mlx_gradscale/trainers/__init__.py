"""Loss scaling for trainers with their own training loop, such as mlx-lm's."""
