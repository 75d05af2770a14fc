"""The solutions: packed, cached, and whether they run here or have changed."""
