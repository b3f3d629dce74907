"""Sampled tokens and their transfer to the host."""
