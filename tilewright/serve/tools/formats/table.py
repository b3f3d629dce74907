"""Tool call formats of models, and their detection in chat templates."""

from __future__ import annotations

from tilewright.serve.tools.base import ToolFormat
from tilewright.serve.tools.formats.gemma import GEMMA
from tilewright.serve.tools.formats.hermes import HERMES
from tilewright.serve.tools.formats.llama3_json import LLAMA3_JSON
from tilewright.serve.tools.formats.mistral import MISTRAL
from tilewright.serve.tools.formats.phi4 import PHI4
from tilewright.serve.tools.formats.qwen3_coder import QWEN3_CODER

FORMATS = {each.name: each for each in (QWEN3_CODER, HERMES, MISTRAL, PHI4, LLAMA3_JSON, GEMMA)}
"""The formats by name; of two whose marks a template has, the first one is meant."""

GENERIC = HERMES
"""The format of a model whose chat template tells of none."""


def format_of(template: str) -> ToolFormat | None:
    """Return the format with marks in a chat template, or None."""
    for each in FORMATS.values():
        if any(mark in template for mark in each.marks):
            return each
    return None
