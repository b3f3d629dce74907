"""Executables over several ranks."""
