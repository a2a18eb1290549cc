"""What the scaler costs, measured on this machine: ``python -m benchmarks``."""
