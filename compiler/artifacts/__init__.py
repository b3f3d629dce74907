"""Compiled models on disk: a user's folders, and the cache. Excludes checkpoint formats."""
