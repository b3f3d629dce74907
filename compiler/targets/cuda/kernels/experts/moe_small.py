"""Kernels of moe_small.cu, and a block's memory.

Excludes launches. Legend: T tokens, K experts for a token.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from tilewright.compiler.targets.cuda.kernels.common import nvrtc
from tilewright.compiler.targets.cuda.kernels.matmul.gemv import MOST_SHARED, STEP_BYTES, X_PADDING
from tilewright.compiler.targets.cuda.tuning import tuning
from tilewright.compiler.targets.cuda.weights.packed_weight import (
    TILE_COLUMNS,
    TILE_ROWS,
    PackedWeight,
)

MAX_TOKENS: int = tuning()["experts"]["few_rows"]
MOST_CHOSEN_AMONG = 256
"""Maximum experts for selection within a matmul."""

SUM_WARPS = 9
MOST_TILES = 32
_TILE_BYTES = 8 * 2 + 4  # pairs and the expert

DEPTHS = {kind: tuple(each) for kind, each in tuning()["experts"]["few_depths"].items()}
"""Steps of 128 columns in flight per warp, for a matmul and for a sum. With a token and the sizes
in Qwen3.5-35B-A3B, a matmul's block and a sum's block fit on a multiprocessor.
"""

PATH = Path(__file__).with_name("moe_small.cu")


def kernel(kind: str, depth: int, *, is_sum: bool) -> str:
    """Return the name of a kernel."""
    return f"expert_{'sum' if is_sum else 'linear'}_small_{kind}_{depth}"


NAMES = tuple(
    kernel(kind, int(depth), is_sum=what == "SUM")
    for what, kind, depth in re.findall(
        r"^(LINEAR|SUM)\((\w+), \w+, (\d+)\)", PATH.read_text(), re.M
    )
)
"""Kernels in the last lines of the file."""


def num_warps(format_name: str, *, is_sum: bool) -> int:
    """Return the warps in a block, as moe_small.cu."""
    return SUM_WARPS if is_sum else {"mxfp4": 11}.get(format_name, 5)


def depth_of(
    packed: PackedWeight, shared: PackedWeight | None, *, num_tokens: int, top_k: int, is_sum: bool
) -> int:
    """Return the steps in flight for a matmul, with the shared expert if present. 0: no kernel
    fits.
    """
    if num_tokens > MAX_TOKENS or num_tokens * top_k > MOST_TILES:
        return 0
    if not is_sum and shared is not None and shared.num_columns != packed.num_columns:
        return 0
    depth = DEPTHS[packed.format][is_sum]
    sizes = {"num_tokens": num_tokens, "top_k": top_k}
    return depth if room(packed, shared, **sizes, is_sum=is_sum, depth=depth) <= MOST_SHARED else 0


def takes_choice(
    products: Sequence[tuple[PackedWeight, PackedWeight | None]], num_experts: int, top_k: int
) -> bool:
    """Return whether a matmul and a sum, with optional shared experts, select a token's experts
    from ``num_experts`` on all ranks.
    """
    sizes = {"num_tokens": 1, "top_k": top_k}
    return num_experts <= MOST_CHOSEN_AMONG and all(
        depth_of(packed, shared, **sizes, is_sum=bool(index))
        for index, (packed, shared) in enumerate(products)
    )


def room(
    packed: PackedWeight,
    shared: PackedWeight | None,
    *,
    num_tokens: int,
    top_k: int,
    is_sum: bool,
    depth: int,
) -> int:
    """Return a block's shared memory in bytes."""
    ring = num_warps(packed.format, is_sum=is_sum) * depth * STEP_BYTES[packed.format]
    steps = max(each.num_column_tiles for each in (packed, shared) if each is not None)
    rows = num_tokens * (top_k + (shared is not None)) if is_sum else num_tokens
    x_bytes = rows * (steps * TILE_COLUMNS + X_PADDING) * 2
    products = rows * TILE_ROWS * 4 + MOST_TILES * 4 if is_sum else 0
    return ring + x_bytes + products + MOST_TILES * _TILE_BYTES + 4


def launch_bytes(packed: PackedWeight, used: int, num_blocks: int) -> int:
    """Return the shared memory for a matmul's launch with ``num_blocks``, a block per
    multiprocessor.

    If the sum has no more blocks, two matmul blocks on a multiprocessor would leave a sum's block
    without a place. Larger sums are not measured.
    """
    is_small = packed.num_columns <= TILE_ROWS * num_blocks
    return max(used, nvrtc.min_shared(1)) if is_small else used
