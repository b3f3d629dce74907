"""Calibration: weight codes chosen by second moments."""
