"""What loss scaling costs: ``python -m benchmarks``."""
