"""The tests mirror `src/hebbian_softmax`: a module's tests lie in the folder of the same name."""

from pathlib import Path

ROOT = Path(__file__).parents[1]
SHARED = ROOT.parent / "shared"
"""Real data and the paper's text lie here on some machines; tests that need them skip where they are absent."""
