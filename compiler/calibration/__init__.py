"""Calibration: weights whose codes are chosen by second moments of activations."""
