"""Packed weights on the device."""
