"""Exact emulation of a device program: matrix unit, packer and vector unit."""
