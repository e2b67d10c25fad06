"""Training and evaluation of word-level language models."""
