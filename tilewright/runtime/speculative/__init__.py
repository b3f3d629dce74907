"""Speculative decoding: draft tokens from the host, their length and their counters."""
