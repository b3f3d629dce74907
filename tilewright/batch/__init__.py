"""Many requests from a file to a file, by the server's own loop and without a server."""
