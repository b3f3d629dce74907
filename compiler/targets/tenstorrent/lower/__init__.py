"""Lower."""
