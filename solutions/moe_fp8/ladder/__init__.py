"""The generations of the layer, a file each, and `steps`, the single kernels that they call."""
