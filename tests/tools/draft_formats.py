"""Print acceptance against the format of the draft layer, for the stored tiny model.

``python -m tests.tools.draft_formats`` runs on the native CPU kernels. The model is float32.
"""

from __future__ import annotations

from typing import Any

from tests.draft_layers import attach
from tests.targets.test_tiny_mtp import NUM_SLOTS, acceptance_length, agreement
from tests.tiny import compiled, precision_of
from tests.tools import train_tiny_mtp as tiny

FORMATS = ("fp32", "bf16", "q80", "bfp8", "q40", "bfp4", "bfp2")
GROUPS = ("draft_fc", "draft_wqkv", "draft_wo", "draft_ff1_3", "draft_ff2", "draft_lm_head")
BITS = {"fp32": 32.0, "bf16": 16.0, "q80": 8.5, "bfp8": 8.5, "q40": 4.5, "bfp4": 4.5, "bfp2": 2.5}


def main() -> None:
    """Print a Markdown table."""
    model, layer, text = tiny.load()
    print("| draft format | bits per weight | agreement (%) | accepted tokens per verification |")
    print("|---|---|---|---|")
    for name in FORMATS:
        made: Any = compiled(model, "cpu-native", max_batch=NUM_SLOTS, max_context=tiny.LENGTH)
        precision = precision_of(**dict.fromkeys(GROUPS, name))
        attach(made, model, layer, "cpu-native", precision=precision)
        parts = text[:NUM_SLOTS], text[NUM_SLOTS:]
        share = sum(agreement(made, lines) for lines in parts) / len(parts)
        length = sum(acceptance_length(made, lines) for lines in parts) / len(parts)
        print(f"| {name} | {BITS[name]:g} | {100 * share:.1f} | {length - 1:.2f} |", flush=True)
        made.close()


if __name__ == "__main__":
    main()
