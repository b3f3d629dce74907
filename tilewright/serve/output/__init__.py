"""Output text, tool calls and finish reasons."""
