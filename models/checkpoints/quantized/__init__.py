"""Quantized modules of Hugging Face folders, one scheme a file."""
