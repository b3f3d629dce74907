"""Steps captured as CUDA graphs."""
