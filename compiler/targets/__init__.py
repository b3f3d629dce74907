"""Targets: what a graph is compiled for. Each imports its own libraries, when asked for."""
