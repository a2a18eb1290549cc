"""Add loss scaling to trainers that have their own training loop, such as mlx-lm."""
