"""From traces to rankings and their tables."""
