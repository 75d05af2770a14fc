"""The layer on the host: checks, reference model, rows, and the calls that make it up."""
