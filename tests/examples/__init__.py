"""The examples, run small."""
