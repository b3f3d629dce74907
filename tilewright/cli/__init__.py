"""The command ``tilewright``."""
