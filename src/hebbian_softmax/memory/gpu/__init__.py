"""The memories' kernels for GPUs, in Triton; import them only through :func:`hebbian_softmax._triton.load`."""
