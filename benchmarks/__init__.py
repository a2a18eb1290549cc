"""Measure the cost of loss scaling: ``python -m benchmarks``."""
