"""The engine processes' clients."""
