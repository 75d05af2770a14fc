"""Interchangeable pieces of a generation, one file each."""
