"""Text corpora: one module for each, how they are prepared and opened, and where their sources come from."""
