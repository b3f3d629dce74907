"""Search over precision configurations."""
