"""Causal convolution and the Gated DeltaNet rule, for one token and for prompts."""
