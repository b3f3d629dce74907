"""Clients that load a server and say what they heard; a scenario per module."""
