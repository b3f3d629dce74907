"""NVIDIA GPUs: fused kernels, paged KV cache, CUDA graphs."""
