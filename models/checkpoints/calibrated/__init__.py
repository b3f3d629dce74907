"""Calibrated folders: weights as their formats' codes, bound to one precision."""
