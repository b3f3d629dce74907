"""Clients that load a server and say what they heard; a plan of load a module."""
