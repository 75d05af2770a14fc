"""Definitions, workloads and their tensors, references, traces: reading and writing data sets."""
