"""The CUDA target's numeric contract, and the storage formats for weights and caches."""

from __future__ import annotations

import math

from torch import Tensor

from tilewright.compiler.formats import get_format
from tilewright.compiler.ir.recipe import WeightRecipe
from tilewright.compiler.targets.contract.record import (
    EMULATED,
    HONOURED,
    NOT_HONOURED,
    Meaning,
    Meanings,
)
from tilewright.compiler.targets.cuda.tuning import tuning
from tilewright.compiler.targets.cuda.weights.coded_tiles import CODED_TILES
from tilewright.compiler.targets.cuda.weights.packed_weight import (
    EXPERT_TILE_BYTES,
    TILE_BYTES,
    TILE_COLUMNS,
    TILE_ROWS,
    tile_bytes,
)
from tilewright.compiler.targets.interface.base import WeightStorage
from tilewright.errors import CompileError, allowed

BLOCK_KINDS = tuple(TILE_BYTES)
"""Block formats that kernels read directly."""

EXACT_IN_BF16 = ("bf16", "bfp8", "bfp4", "bfp2")
_FORMATS = (*EXACT_IN_BF16, *CODED_TILES)
CACHE_KINDS = ("bf16", "bfp8")
TABLES = ("embedding",)
_LOFI = "e4m3 x e4m3 from {} rows on where the weight is exact in it, else bf16 x bf16; fp32 sums"

_CODES = "bf16 codes x bf16, fp32 sums and scales"
_ROUNDED = f"; from {tuning()['matmul']['library_min_rows']['cut']} rows on bf16 values x bf16"


def storage_format(recipe: WeightRecipe, group: str | None) -> str:
    """Return a matmul weight's storage format: its own blocks or codes, or bfloat16 (exact).

    Raises:
        CompileError: No kernel reads the format's values.
    """
    assert recipe.format is not None
    if is_coded(recipe):
        return recipe.format
    if recipe.format in EXPERT_TILE_BYTES and recipe.block_axis == "in" and len(recipe.shape) == 3:
        return recipe.format
    if recipe.format not in EXACT_IN_BF16:
        raise CompileError(
            f"{group or 'weight'} {recipe.names[0]}: format {recipe.format}{_where(recipe)} on "
            "target cuda, which has no kernel for it; "
            f"{allowed(EXACT_IN_BF16 if _where(recipe) else _FORMATS)}"
        )
    in_blocks = recipe.format in BLOCK_KINDS and recipe.block_axis == "in"
    return recipe.format if in_blocks and group not in TABLES else "bf16"


def target_format(name: str, num_axes: int) -> str:
    """Return the format for a stored weight: its own if a kernel reads it.

    MXFP4 keeps its codes in experts. All other codes of experts become bfp8, and so do dense
    weights in MXFP4. Everything else becomes bf16.
    """
    if name in EXPERT_TILE_BYTES:
        return name if num_axes == 3 else "bfp8"
    if name in EXACT_IN_BF16 or (name in CODED_TILES and num_axes == 2):
        return name
    return "bfp8" if name in CODED_TILES else "bf16"


def is_coded(recipe: WeightRecipe) -> bool:
    """Return whether a weight is in tiles of codes. Experts and blocks along ``out`` are not."""
    return recipe.format in CODED_TILES and recipe.block_axis == "in" and len(recipe.shape) == 2


def _where(recipe: WeightRecipe) -> str:
    if recipe.format not in CODED_TILES:
        return ""
    return " of experts" if len(recipe.shape) > 2 else " in blocks along out"


def cache_kind(format_name: str, *, exact: bool) -> str:
    """Return a KV cache's storage format: the requested format if supported, else bfloat16.

    fp32 if ``exact``.
    """
    if exact:
        return "fp32"
    return format_name if format_name in CACHE_KINDS else "bf16"


def weight_storage(recipe: WeightRecipe, group: str | None) -> WeightStorage:
    """Return how `packing` stores a weight, with separate tiles per expert.

    Tensors without a group (norms, biases, constants) are float32.

    Raises:
        CompileError: bfloat16 cannot represent the format's values.
    """
    if group is None:
        return WeightStorage("float32", 4 * math.prod(recipe.shape))
    *experts, num_rows, num_columns = recipe.shape
    return tiles(storage_format(recipe, group), (math.prod(experts), num_rows, num_columns))


def tiles(kind: str, sizes: tuple[int, int, int]) -> WeightStorage:
    """Return the storage of ``count`` separate weights ``[rows, columns]`` in whole tiles."""
    count, num_rows, num_columns = sizes
    num_tiles = count * -(-num_rows // TILE_ROWS) * -(-num_columns // TILE_COLUMNS)
    if kind == "bf16":
        return WeightStorage("bfloat16", 2 * num_tiles * TILE_ROWS * TILE_COLUMNS)
    return WeightStorage(
        f"{kind} {'codes' if kind in CODED_TILES else 'blocks'}", num_tiles * tile_bytes(kind)
    )


def format_values(dense: Tensor, recipe: WeightRecipe) -> Tensor:
    """Return a dense weight, or some experts, rounded to the recipe's format, as float32."""
    assert recipe.format is not None
    axis = -1 if recipe.block_axis == "in" or dense.dim() == 1 else -2
    return get_format(recipe.format).round_trip(dense, axis=axis)


def meanings(
    *, exact: bool, e4m3_rows: int = 0, rounded: bool = False, bfp8_pages: bool = False
) -> Meanings:
    """Return how the target implements each part of a precision configuration.

    Args:
        exact: ``--compute exact``.
        e4m3_rows: Minimum rows of e4m3 operands in lofi matmuls of bfp4 weights. 0: never.
        rounded: Weights in codes have bfloat16 copies for large batches.
        bfp8_pages: Some layers have bfp8 caches.
    """

    def weight(name: str, axis: str) -> Meaning:
        if name == "nf4" and axis == "in" and not exact:
            return Meaning(EMULATED, "nf4 codes with values rounded to bf16")
        if name in (*CODED_TILES, *EXPERT_TILE_BYTES) and axis == "in":
            return Meaning(HONOURED, name)
        if name not in EXACT_IN_BF16:
            return Meaning(NOT_HONOURED, "refused")
        if (name in BLOCK_KINDS and axis == "in") or name == "bf16":
            return Meaning(HONOURED, name)
        return Meaning(EMULATED, f"{name} values in bf16, blocks along {axis}")

    def fidelity(format_name: str, axis: str, requested: str, phase: str) -> Meaning:
        if exact:
            return Meaning(NOT_HONOURED, "fp32")
        if e4m3_rows and (format_name, axis, requested) == ("bfp4", "in", "lofi"):
            return Meaning(HONOURED, _LOFI.format(e4m3_rows))
        if format_name in CODED_TILES:
            return Meaning(EMULATED, _CODES + (_ROUNDED if rounded else ""))
        return Meaning(EMULATED, "bf16 x bf16, fp32 sums")

    def attention(requested: str, phase: str) -> Meaning:
        if exact:
            return Meaning(NOT_HONOURED, "fp32")
        of_bfp8 = " (bfp8 pages: fp16 x fp16)" if bfp8_pages and phase == "decode" else ""
        return Meaning(EMULATED, f"bf16 x bf16{of_bfp8}, fp32 sums and softmax")

    def kv_cache(name: str) -> Meaning:
        used = cache_kind(name, exact=exact)
        return Meaning(HONOURED if used == name else NOT_HONOURED, used)

    def activation(name: str) -> Meaning:
        if exact:
            return Meaning(NOT_HONOURED, "fp32")
        status = HONOURED if name == "bf16" else NOT_HONOURED
        return Meaning(status, "bf16 into products, fp32 between layers")

    return Meanings(
        weight=weight,
        fidelity=fidelity,
        attention=attention,
        kv_cache=kv_cache,
        activation=activation,
    )
