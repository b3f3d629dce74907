"""Requests, scheduling and generation on top of an executable's steps."""
