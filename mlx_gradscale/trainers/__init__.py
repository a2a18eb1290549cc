"""Add loss scaling to trainers with their own training loop, such as mlx-lm's."""
