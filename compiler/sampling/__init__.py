"""How a token is chosen from logits: the definition, on arrays. Imports no torch."""
