"""Attention over a paged KV cache, and RoPE: CUDA C++ with Triton twins."""
