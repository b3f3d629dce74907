"""Trace: accuracy loss by layer, operation and setting."""
