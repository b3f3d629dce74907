"""Check that a row of each cuBLAS matmul has equal bits in any batch.

Runs in a separate process, because the workspace is disabled at process start.
"""

from __future__ import annotations

import sys

import torch

from tilewright.compiler.targets.cuda.invariance import withhold_workspace
from tilewright.compiler.targets.cuda.steps.cublas import add_product, store_product
from tilewright.compiler.targets.cuda.steps.matmul import LEAST_STRICT

_SHAPES = {
    "llama-3.2-1b": ((3072, 2048), (2048, 2048), (16384, 2048), (2048, 8192), (128256, 2048)),
    "llama-3.1-8b": ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (128256, 4096)),
}
_ROWS = (1, 2, 4, 8, 16, 17, 24, 32, 48, 64, 100, 128, 192, 200, 256, 300, 512, 784, 1024, 4096)
_MOST_LOGITS = 256 * 128256


def main() -> int:
    withhold_workspace()
    torch.manual_seed(0)
    worst = 0
    for name, shapes in _SHAPES.items():
        for rows, columns in shapes:
            weight = torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16)
            x = torch.randn(_ROWS[-1], columns, device="cuda", dtype=torch.bfloat16)
            for kind in ("store", "add", "bf16"):
                counts = [each for each in _ROWS if each * rows <= _MOST_LOGITS]
                wanted = product(kind, x[: counts[-1]], weight)
                differing = [
                    each
                    for each in counts
                    if not torch.equal(product(kind, x[:each], weight), wanted[:each])
                ]
                many = [each for each in differing if each >= LEAST_STRICT]
                worst = max(worst, len(many))
                if differing:  # without a promise below a step's row count
                    print(f"{name} {rows} x {columns} {kind}: of {differing} rows others' bits")
    return 1 if worst else 0


def product(kind: str, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Run a matmul as in steps: stored in float32, added to float32, or in bfloat16."""
    if kind == "bf16":
        return torch.mm(x, weight.T)
    out = torch.ones(len(x), len(weight), device="cuda")
    (store_product if kind == "store" else add_product)(out, x, weight)
    return out


if __name__ == "__main__":
    sys.exit(main())
