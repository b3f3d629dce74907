"""The running servers of the server tests."""

from tests.serve.conftest import server, start_server, tiny_gguf

__all__ = ["server", "start_server", "tiny_gguf"]
