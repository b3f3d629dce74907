"""Offline batches: data sets that are made, and our runs beside those of others."""
