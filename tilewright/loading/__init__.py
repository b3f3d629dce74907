"""Loading: open a path, compile through the cache, start ranks."""
