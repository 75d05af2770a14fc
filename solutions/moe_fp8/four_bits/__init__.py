"""The layer on MXFP4 weights as a checkpoint has them, as solutions: packed and re-encoded."""
