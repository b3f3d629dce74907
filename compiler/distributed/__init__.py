"""Meshes of chips and ranks, and what runs over them."""
