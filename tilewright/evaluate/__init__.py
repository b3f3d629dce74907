"""Measuring: timing, accuracy, one JSON line per measurement, and PERF.md made from such lines."""
