"""Each command's arguments."""
