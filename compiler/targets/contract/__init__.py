"""Numeric contract of a target."""
