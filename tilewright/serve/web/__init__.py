"""HTTP requests, responses and streams."""
