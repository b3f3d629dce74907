"""Dispatch of program instructions to kernels."""
