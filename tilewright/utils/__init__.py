"""Shared utilities: files, JSON lines, YAML, child processes, registries."""
