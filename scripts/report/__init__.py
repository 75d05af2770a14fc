"""The page of a run, and the generated parts of the documentation."""
