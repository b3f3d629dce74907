"""Slots, pages and snapshots."""
