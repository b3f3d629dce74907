"""Tilewright: large language models with the precision of every layer declared and measured.

These names are the public API. They are imported on first use: ``import tilewright`` loads neither
torch nor a target.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tilewright.api import compile, load
    from tilewright.llm import LLM
    from tilewright.options.engine_config import EngineConfig
    from tilewright.runtime.engine import Engine

__all__ = ["LLM", "Engine", "EngineConfig", "compile", "load"]

_HOMES = {
    "LLM": "tilewright.llm",
    "Engine": "tilewright.runtime.engine",
    "EngineConfig": "tilewright.options.engine_config",
    "compile": "tilewright.api",
    "load": "tilewright.api",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
