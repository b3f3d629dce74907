"""``tilewright sweep``: plans run and resumed, their state, their tables and plots."""
