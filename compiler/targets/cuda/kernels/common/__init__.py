"""Compilation and launch of CUDA C++ kernels, and device headers shared by several ops."""
