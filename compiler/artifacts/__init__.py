"""Compiled models on disk: folders a user keeps, and the cache. They know no checkpoint formats."""
