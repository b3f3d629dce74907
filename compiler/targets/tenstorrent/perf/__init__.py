"""Perf."""
