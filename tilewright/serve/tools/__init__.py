"""Parsers for function calls in streamed text, with a file per format."""
