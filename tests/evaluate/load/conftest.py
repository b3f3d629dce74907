"""The running servers of the server tests."""

from tests.serve.conftest import server, tiny_gguf

__all__ = ["server", "tiny_gguf"]
