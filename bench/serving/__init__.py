"""Load tests for our server and another server, with a common client."""
