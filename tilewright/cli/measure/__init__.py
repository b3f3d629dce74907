"""Measurements of ``tilewright bench``."""
