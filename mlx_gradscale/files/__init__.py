"""Atomic file writes, bounded reads of untrusted files, and text formatting."""
