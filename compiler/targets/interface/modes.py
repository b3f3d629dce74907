"""What may be chosen of an executable by name. Imports nothing: command lines only say it."""

from __future__ import annotations

COMPUTE_MODES = ("fast", "exact")
"""Arithmetic: the target's fastest, or float32 throughout."""
COPIES = ("auto", "none", "codes", "all")
"""Which weights in blocks are held once more; see `CompileOptions`."""
