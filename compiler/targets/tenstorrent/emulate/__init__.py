"""Emulate."""
