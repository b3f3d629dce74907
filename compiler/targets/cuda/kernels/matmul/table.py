"""Kernel selection for dense matmuls by weight and rows. Excludes launches."""

from __future__ import annotations

from dataclasses import dataclass

from tilewright.compiler.targets.cuda.kernels.common.launch import num_processors
from tilewright.compiler.targets.cuda.kernels.common.table import (
    EVERY,
    EXACT,
    FAST,
    NONE,
    STRICT,
    Gpu,
    Ranges,
    TableRow,
    bind,
)
from tilewright.compiler.targets.cuda.kernels.matmul import (
    gemm_bf16,
    gemm_block,
    gemm_block_e4m3,
    gemm_block_triton,
    gemm_swiglu_bf16,
    gemv,
)
from tilewright.compiler.targets.cuda.tuning import tuning
from tilewright.compiler.targets.cuda.weights.coded_tiles import CODED_TILES
from tilewright.compiler.targets.cuda.weights.e4m3 import least_lofi
from tilewright.compiler.targets.cuda.weights.packed_weight import TILE_BYTES, PackedWeight

GEMV, DENSE, BLOCK, E4M3 = "gemv", "dense", "block", "e4m3"
CUBLAS, TRITON, CODED = "cublas", "triton", "coded"
SWIGLU, BLOCK_E4M3, BLOCK_TRITON = "swiglu", "block e4m3", "block triton"

_BLOCKS = tuple(TILE_BYTES)
_FORMATS = ("bf16", *_BLOCKS)
_CODED = tuple(CODED_TILES)
_UNSUMMED = (*_BLOCKS, "nvfp4")


@dataclass(frozen=True, slots=True)
class MatmulSite:
    """A plan's matmul in a phase, without the batch size.

    Attributes:
        weight: Packed weight. Only format and shape are read.
        decodes: Whether this is a decode step.
        arithmetic: ``exact``, ``strict`` or ``fast``.
        gpu: The GPU.
        has_values: Whether a bfloat16 copy exists.
        has_codes: Whether an e4m3 copy exists and the phase's fidelity permits it.
        has_one_order: Whether `GEMV` gives equal bits in all strict decode steps.
        is_aligned: Whether rows are aligned for the copy engine, in x and in the result.
        fed: Rows for which the next matmul reads the result in the `BLOCK` layout.
    """

    weight: PackedWeight
    decodes: bool
    arithmetic: str
    gpu: Gpu
    has_values: bool = False
    has_codes: bool = False
    has_one_order: bool = False
    is_aligned: bool = True
    fed: tuple[range, ...] = ()

    @property
    def kind(self) -> str:
        return self.weight.kind

    @property
    def has_whole_fours(self) -> bool:
        """Return whether the CUDA C++ kernels can read the weight's rows."""
        return self.weight.num_columns % 4 == 0


def _code_rows(site: MatmulSite) -> range:
    return gemm_block_e4m3.rows_of(site.weight) if site.has_codes else NONE


def _library_rows(site: MatmulSite) -> range:
    """Return the rows for which cuBLAS on a bfloat16 copy is faster than other kernels.

    Kernels with scales for the sums of blocks lose to it with fewer rows.
    """
    least = tuning()["matmul"]["library_min_rows"]
    is_uncut = site.weight.num_rows >= 16 * gemv.UNCUT_TILES and site.weight.format in _UNSUMMED
    return range(least["uncut" if is_uncut else "cut"], EVERY.stop) if site.has_values else NONE


def _gemv_rows(site: MatmulSite) -> range:
    """Return the rows for `GEMV`. Several launches run strict steps, and large weights."""
    packed, most = site.weight, gemv.most_tokens(site.weight)
    if site.decodes and site.arithmetic == STRICT:
        return EVERY
    if not site.decodes or packed.kind == "bf16":
        return range(1, most + 1)
    limits = tuning()["matmul"]["gemv_parts"]
    if packed.num_rows > limits["max_dequantized_out_features"]:
        return EVERY
    is_large = gemv.num_slices(packed) == 1 or packed.num_columns > limits["min_in_features"]
    return range(1, (max(most, limits["max_rows"]) if is_large else most) + 1)


def _coded_rows(site: MatmulSite) -> range:
    """Return the rows for `GEMV`. In fast steps the rows fit a launch, else `CODED` runs them."""
    if not site.has_whole_fours:
        return NONE
    return EVERY if site.arithmetic == STRICT else range(1, gemv.MAX_TOKENS + 1)


def _coded_block_rows(site: MatmulSite) -> range:
    """Return the rows for `BLOCK`. In strict prompts, several launches run any number of rows."""
    rows = _block_rows(site)
    is_every = rows and site.arithmetic == STRICT and not site.decodes
    return range(rows.start, EVERY.stop) if is_every else rows


def _block_rows(site: MatmulSite) -> range:
    return gemm_block.rows_of(site.weight, same_bits=site.arithmetic == STRICT)


def _dense_rows(site: MatmulSite) -> range:
    is_ours = site.is_aligned and site.has_whole_fours
    return gemm_bf16.rows_of(site.weight) if is_ours else NONE


def _swiglu_rows(site: MatmulSite) -> tuple[range, ...]:
    """Return the rows with bfloat16 values in memory: the weight, or a copy for cuBLAS.

    Several launches take any number of rows above the maximum.
    """
    packed = site.weight
    if not packed.is_paired or not site.is_aligned or site.has_codes:
        return ()
    taken = gemm_swiglu_bf16.rows_of(packed.num_rows, num_processors(packed.data.device))
    if taken:
        taken += (range(gemm_swiglu_bf16.MAX_TOKENS + 1, EVERY.stop),)
    if packed.kind != "bf16":
        return _within(taken, _library_rows(site))
    for rows in _within(site.fed, _dense_rows(site)):
        rest = range(1, rows.start), range(rows.stop, EVERY.stop)
        taken = tuple(part for limits in rest for part in _within(taken, limits))
    return taken


def _within(ranges: tuple[range, ...], limits: range) -> tuple[range, ...]:
    cut = (range(max(r.start, limits.start), min(r.stop, limits.stop)) for r in ranges)
    return tuple(filter(None, cut))


def _triton_rows(site: MatmulSite) -> range:
    """Return the rows for `TRITON`. Without `GEMV`, cuBLAS multiplies more rows of bfloat16."""
    if not site.has_whole_fours:
        return range(1, gemv.MAX_TOKENS + 1)
    limits = tuning()["matmul"]["triton_max_rows"]
    limit = limits["bf16" if site.weight.format == "bf16" else "blocks"]
    return NONE if site.gpu.has_cpp else range(1, limit + 1)


def _block_triton_rows(site: MatmulSite) -> range:
    """Return the rows for `BLOCK_TRITON`, which decodes a weight once for all rows."""
    return NONE if site.gpu.has_cpp else range(1, gemm_block_triton.MAX_TOKENS + 1)


def _e4m3_rows(site: MatmulSite) -> range:
    return range(least_lofi(has_cpp=site.gpu.has_cpp), EVERY.stop) if site.has_codes else NONE


MATMUL: tuple[TableRow[MatmulSite], ...] = (
    TableRow(SWIGLU, (*_FORMATS, *_CODED), _swiglu_rows, (FAST,), is_cpp=True),
    TableRow(BLOCK_E4M3, ("bfp4",), _code_rows, (FAST,), is_cpp=True),
    TableRow(E4M3, ("bfp4",), _e4m3_rows, (EXACT, FAST)),
    TableRow(DENSE, ("bf16",), _dense_rows, (FAST,), is_cpp=True),
    TableRow(CUBLAS, (*_FORMATS, *_CODED), lambda site: EVERY, (EXACT,)),
    TableRow(CUBLAS, (*_BLOCKS, *_CODED), _library_rows, (FAST,)),
    TableRow(
        BLOCK,
        gemv.CODED,
        _coded_block_rows,
        (STRICT, FAST),
        is_cpp=True,
    ),
    TableRow(GEMV, gemv.CODED, _coded_rows, (STRICT, FAST), is_cpp=True),
    TableRow(CODED, _CODED, lambda site: EVERY, (STRICT, FAST)),
    TableRow(
        CUBLAS,
        _FORMATS,
        lambda site: NONE if site.decodes and site.has_one_order else EVERY,
        (STRICT,),
    ),
    TableRow(BLOCK, _BLOCKS, _block_rows, (STRICT, FAST), is_cpp=True),
    TableRow(
        GEMV,
        _FORMATS,
        lambda site: _gemv_rows(site) if site.has_whole_fours else NONE,
        (STRICT, FAST),
        is_cpp=True,
    ),
    TableRow(TRITON, _FORMATS, _triton_rows, (STRICT, FAST)),
    TableRow(BLOCK_TRITON, _BLOCKS, _block_triton_rows, (FAST,)),
    TableRow(CUBLAS, _FORMATS, lambda site: EVERY, (STRICT, FAST)),
)
"""Selection order: the first match gives the kernel."""


def bind_matmul(site: MatmulSite) -> Ranges[str]:
    """Return a matmul's kernels by rows."""
    return bind(MATMUL, site)
