"""Timing, accuracy and device ceilings."""
