"""The device kernels, as functions of torch tensors: what serves a GPU architecture is in its folder."""
