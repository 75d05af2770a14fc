"""The generations of the layer, a file each, and the single kernels that they call (`steps`)."""
