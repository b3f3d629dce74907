"""The kernel library's programs."""
