"""Cases, prompts, texts and fp32 references."""
