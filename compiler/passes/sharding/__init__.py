"""Sharding passes."""
