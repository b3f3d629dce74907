"""The OpenAI-compatible server: a front process that speaks HTTP, and what it asks an engine."""
