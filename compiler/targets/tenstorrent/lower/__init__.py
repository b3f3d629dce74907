"""Lowering of a graph to a device program."""
