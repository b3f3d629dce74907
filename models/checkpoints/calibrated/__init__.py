"""Calibrated folders: weights as codes of their formats, bound to one precision."""
