"""Clients of the engine processes."""
