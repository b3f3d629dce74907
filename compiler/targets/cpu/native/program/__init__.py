"""Programs of the kernel library."""
