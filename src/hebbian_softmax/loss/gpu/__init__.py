"""The engine of the loss for GPUs of the Hopper generation or later; ``_triton.load`` imports it."""
