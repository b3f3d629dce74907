"""Emit ttnn."""
