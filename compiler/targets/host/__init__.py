"""Executables with slot state on the host."""
