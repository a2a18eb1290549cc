"""Whole files or none: atomic writing, folders, locks, arrays, plain text."""
