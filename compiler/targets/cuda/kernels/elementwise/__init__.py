"""Norms, SwiGLU, gates and embedding rows, in Triton."""
