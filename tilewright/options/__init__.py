"""Model options as dataclasses."""
