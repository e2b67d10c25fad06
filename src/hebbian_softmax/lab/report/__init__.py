"""How runs are shown: tables, figures, one HTML page, and the frame of every experiment."""
