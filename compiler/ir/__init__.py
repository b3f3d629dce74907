"""The graph: torch.fx plus frozen facts on every node, patterns, checks, text and costs."""
