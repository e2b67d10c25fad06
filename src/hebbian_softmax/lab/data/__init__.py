"""One module for each data set, one data root, one way to download."""
