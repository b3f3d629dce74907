"""Trace: in which layers, operations and settings accuracy is lost."""
