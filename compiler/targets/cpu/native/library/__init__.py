"""Kernel library: build, load, call."""
