"""Targets: compilers from a graph to an executable. A target imports its libraries on first use."""
