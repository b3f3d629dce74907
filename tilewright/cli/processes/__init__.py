"""Child processes of commands."""
