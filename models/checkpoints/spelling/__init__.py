"""Layer names in config.json and GGUF metadata."""
