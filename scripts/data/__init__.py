"""The definition, the workloads and their tensors; reading data sets."""
