"""Which path is answered by what, by topic."""
