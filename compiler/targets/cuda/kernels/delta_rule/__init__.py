"""Delta rule."""
