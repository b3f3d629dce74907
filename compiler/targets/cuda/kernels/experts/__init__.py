"""Experts."""
