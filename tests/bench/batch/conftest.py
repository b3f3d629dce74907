"""Commands that must succeed, as for tests of commands."""

from tests.cli.conftest import run, tiny_gguf

__all__ = ["run", "tiny_gguf"]
