"""OpenAI-compatible API server, and its client of the engine."""
