"""The layer on the host: its problem, its torch model, its rows, and the calls that make it up."""
