"""Images in prompts: decoding with limits, resizing, patches and positions. Imports no torch."""
