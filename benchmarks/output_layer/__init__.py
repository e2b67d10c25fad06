"""The output layer's forward and backward pass, side by side with its peers."""

import os

os.environ.setdefault(
    "KINETO_LOG_LEVEL", "99"
)  # Before torch is imported, whose profiler would print every start and stop.
