"""A graph's lowering to a device program."""
