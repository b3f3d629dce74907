"""distributed-llama .m files."""
