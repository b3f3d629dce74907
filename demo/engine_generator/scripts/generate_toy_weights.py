"""Random weights for a model_config.json, as the state dict that engines read.

    python scripts/generate_toy_weights.py --config target/model_config.json \\
        --output target/weights/model.pt
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

from tilewright.compiler.targets.cuda.engine.parts.self_test import random_weights
from tilewright.compiler.targets.cuda.engine.parts.settings import read_settings


def main() -> None:
    parser = argparse.ArgumentParser(description="Write random weights, N(0, 0.02).")
    parser.add_argument("--config", required=True)
    parser.add_argument("--output", required=True)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    config = json.loads(Path(given.config).read_text("utf-8"))
    settings = read_settings(config, torch.device("cpu"))
    output = Path(given.output)
    output.parent.mkdir(parents=True, exist_ok=True)
    torch.save(random_weights(settings, given.seed), output)


if __name__ == "__main__":
    main()
