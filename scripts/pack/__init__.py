"""Packed solutions: made, available here or not, changed since or not."""
