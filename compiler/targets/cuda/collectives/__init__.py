"""Collectives on GPUs."""
