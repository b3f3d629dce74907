"""Accuracy of calibrated weights beside round to nearest, on texts of several domains."""
