"""PERF.md and other documents, rendered from results."""
