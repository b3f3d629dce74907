"""Load tests of a server, with a module per scenario."""
