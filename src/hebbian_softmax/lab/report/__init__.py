"""What a run shows: tables, figures, one HTML page."""
