"""Device state between steps."""
