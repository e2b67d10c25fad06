"""New tokens in a trained language model: the write of a trained head on frozen features of SmolLM2-135M."""
