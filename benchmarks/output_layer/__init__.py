"""The output layer's forward and backward pass, side by side with its peers."""

import os

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # before torch: its profiler tells of every start and stop
