"""The commands' models and checks, for the benches that are commands themselves."""

from tests.cli.conftest import refused, results, run, tiny_folder, tiny_gguf

__all__ = ["refused", "results", "run", "tiny_folder", "tiny_gguf"]
