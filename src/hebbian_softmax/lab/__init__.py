"""The laboratory: the paper's experiments, run with the library. The library never imports it."""
