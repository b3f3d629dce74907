"""Program instruction dispatch to kernels."""
