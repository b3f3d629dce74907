"""Prompt rendering, tokenization and constraints."""
