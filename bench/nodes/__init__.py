"""CPU nodes over links of a known rate, each in a network of its own."""
