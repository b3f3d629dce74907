"""Random weights for a model_config.json, as the state dict that engines read.

    python scripts/generate_toy_weights.py --config target/model_config.json \\
        --output target/weights/model.pt
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from pathlib import Path

import torch

from tilewright.compiler.targets.cuda.engine_generator.parts.self_test import random_weights
from tilewright.compiler.targets.cuda.engine_generator.parts.settings import read_settings


def main() -> int:
    parser = argparse.ArgumentParser(description="Write random weights, N(0, 0.02).")
    parser.add_argument("--config", required=True)
    parser.add_argument("--output", required=True)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    try:
        config = json.loads(Path(given.config).read_text("utf-8"))
        settings = read_settings(config, torch.device("cpu"))
    except (OSError, ValueError) as error:
        print(f"{given.config}: {error}", file=sys.stderr)
        return 2
    output = Path(given.output)
    partial = output.with_name(output.name + ".partial")  # no suffix that engines read
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        torch.save(random_weights(settings, given.seed), partial)
        partial.replace(output)
    except (OSError, RuntimeError) as error:  # torch reports a file it cannot write as the latter
        print(f"{given.output}: {error}".partition("\n")[0], file=sys.stderr)
        return 2
    finally:
        with contextlib.suppress(OSError):
            partial.unlink()
    return 0


if __name__ == "__main__":
    sys.exit(main())
