"""Execution option names, for command lines. Imports nothing."""

from __future__ import annotations

COMPUTE_MODES = ("fast", "exact")
"""Arithmetic: the target's fastest, or float32 everywhere."""
COPIES = ("auto", "none", "codes", "all")
"""Dequantized weight copies. See `CompileOptions`."""
