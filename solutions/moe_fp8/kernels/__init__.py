"""The device kernels as functions of torch tensors; each GPU architecture has a folder."""
