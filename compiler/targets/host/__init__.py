"""Executables with slots kept on the host."""
