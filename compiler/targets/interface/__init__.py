"""Interfaces of targets and steps."""
