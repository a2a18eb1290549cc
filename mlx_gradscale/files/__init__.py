"""Atomic file writes, bounded file reads, and human-readable text."""
