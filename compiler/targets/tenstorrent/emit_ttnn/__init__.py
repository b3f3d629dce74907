"""Source code for the real ttnn library, written from a device program."""
