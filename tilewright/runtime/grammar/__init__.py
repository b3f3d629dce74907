"""Grammar constraints."""
