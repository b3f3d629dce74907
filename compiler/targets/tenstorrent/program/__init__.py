"""The typed device program: instructions, placements and memory plan."""
