"""The kernels of moe_small.cu: which there are, and the memory that their blocks take.

Knows nothing of launches. Legend: T tokens, K experts for a token.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from tilewright.compiler.targets.cuda.kernels.matmul.gemv import (
    MOST_SHARED,
    STEP_BYTES,
    X_PADDING,
)
from tilewright.compiler.targets.cuda.tuning import tuning
from tilewright.compiler.targets.cuda.weights.packed_weight import (
    TILE_COLUMNS,
    TILE_ROWS,
    PackedWeight,
)

MAX_TOKENS: int = tuning()["experts"]["few_rows"]
MOST_CHOSEN_AMONG = 256
"""Experts that a product chooses among by itself."""

WARPS, SUM_WARPS = 5, 9
MOST_TILES = 32
_TILE_BYTES = 8 * 2 + 4  # of the table: pairs and the expert

DEPTHS = {kind: tuple(each) for kind, each in tuning()["experts"]["few_depths"].items()}
"""Steps of 128 columns that a warp of a product and one of a sum have in flight: for one token what
leaves a block of each room on one multiprocessor, with Qwen3.5-35B-A3B's sizes.
"""

PATH = Path(__file__).with_name("moe_small.cu")


def kernel(kind: str, depth: int, *, is_sum: bool) -> str:
    """The name of a kernel."""
    return f"expert_{'sum' if is_sum else 'linear'}_small_{kind}_{depth}"


NAMES = tuple(
    kernel(kind, int(depth), is_sum=what == "SUM")
    for what, kind, depth in re.findall(
        r"^(LINEAR|SUM)\((\w+), \w+, (\d+)\)", PATH.read_text(), re.M
    )
)
"""What the last lines of the file ask for."""


def num_threads(*, is_sum: bool) -> int:
    """A block's threads."""
    return 32 * (SUM_WARPS if is_sum else WARPS)


def depth_of(
    packed: PackedWeight, shared: PackedWeight | None, *, num_tokens: int, top_k: int, is_sum: bool
) -> int:
    """Steps in flight of the kernel that takes a product, along with that of an expert of all
    tokens where there is one; 0 where none does.
    """
    if num_tokens > MAX_TOKENS or num_tokens * top_k > MOST_TILES:
        return 0
    if not is_sum and shared is not None and shared.num_columns != packed.num_columns:
        return 0
    depth = DEPTHS[packed.kind][is_sum]
    sizes = {"num_tokens": num_tokens, "top_k": top_k}
    return depth if room(packed, shared, **sizes, is_sum=is_sum, depth=depth) <= MOST_SHARED else 0


def takes_choice(
    products: Sequence[tuple[PackedWeight, PackedWeight | None]], num_experts: int, top_k: int
) -> bool:
    """Whether a product and a sum, each with what runs along, find one token's experts themselves,
    of so many on all ranks.
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
    """Bytes of shared memory of a block."""
    ring = (SUM_WARPS if is_sum else WARPS) * depth * STEP_BYTES[packed.kind]
    steps = max(each.num_column_tiles for each in (packed, shared) if each is not None)
    rows = num_tokens * (top_k + (shared is not None)) if is_sum else num_tokens
    x_bytes = rows * (steps * TILE_COLUMNS + X_PADDING) * 2
    products = rows * TILE_ROWS * 4 + MOST_TILES * 4 if is_sum else 0
    return ring + x_bytes + products + MOST_TILES * _TILE_BYTES + 4
