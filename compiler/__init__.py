"""Tilewright's compiler and runtime: graphs, passes, formats, targets, the engine, the benches."""

__version__ = "0.1.0"
