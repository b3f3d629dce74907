"""Plots as SVG and PNG."""
