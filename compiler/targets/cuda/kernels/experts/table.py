"""Expert op tables: expert selection for a token, and expert matmuls. Excludes launches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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
from tilewright.compiler.targets.cuda.kernels.experts import gemm_experts
from tilewright.compiler.targets.cuda.kernels.experts import route as native_route
from tilewright.compiler.targets.cuda.kernels.experts import router as native_router
from tilewright.compiler.targets.cuda.kernels.experts.experts_triton import (
    DECODE_PAIRS,
    MAX_SHORT_MEAN,
    MOST_PAIRS,
    PREFILL_PAIRS,
    SHORT_PAIRS,
)

BLOCKS = "gemm_experts.cu"
INSIDE, JOINED, CPP, TRITON = "inside products", "router.cu", "route.cu", "triton"


@dataclass(frozen=True, slots=True)
class ExpertsSite:
    """A plan's router with its expert matmuls, without the row count.

    Attributes:
        arithmetic: ``exact``, ``strict`` or ``fast``.
        gpu: The GPU.
        decodes: Whether this is a decode step.
        fits: Whether the CUDA C++ kernels support all experts in the plan.
        is_inside: Whether a token's matmuls select its experts.
        is_joined: Whether `JOINED` includes the router's matmul.
        max_rows: Largest row count for the CUDA C++ kernels of decode steps.
    """

    arithmetic: str
    gpu: Gpu
    decodes: bool
    fits: bool
    is_inside: bool = False
    is_joined: bool = False
    max_rows: int = native_route.MAX_TOKENS

    @property
    def kind(self) -> str:
        return "fp32"


def _small_m(site: ExpertsSite) -> range:
    takes = site.decodes and site.fits
    return range(1, site.max_rows + 1) if takes else NONE


def _joined(site: ExpertsSite) -> range:
    last = min(native_router.MAX_TOKENS, site.max_rows)
    rows = range(native_router.MAX_SMALL_M + 1, last + 1)
    return rows if _small_m(site) and site.is_joined else NONE


ROUTE: tuple[TableRow[ExpertsSite], ...] = (
    TableRow(
        INSIDE,
        ("fp32",),
        lambda site: range(1, 2) if _small_m(site) and site.is_inside else NONE,
        (STRICT, FAST),
        is_cpp=True,
    ),
    TableRow(JOINED, ("fp32",), _joined, (FAST,), is_cpp=True),
    TableRow(CPP, ("fp32",), _small_m, (STRICT, FAST), is_cpp=True),
    TableRow(TRITON, ("fp32",)),
)
"""Selection order: the first table row with a matching range gives the kernel. Rows with
`TRITON` use Triton for the matmuls, all other rows CUDA C++.
"""


def bind_route(site: ExpertsSite) -> Ranges[str]:
    """Return a router's kernels by row count."""
    return bind(ROUTE, site)


@dataclass(frozen=True, slots=True)
class PromptSite:
    """An expert matmul in a prompt, without the row count."""

    kind: str
    arithmetic: str
    gpu: Gpu
    num_columns: int


PROMPT: tuple[TableRow[PromptSite], ...] = (
    TableRow(
        BLOCKS,
        gemm_experts.FORMATS,
        lambda site: NONE if site.num_columns % 2 else EVERY,
        (FAST,),
        is_cpp=True,
    ),
    TableRow(TRITON, ("bf16", *gemm_experts.FORMATS)),
)
"""Kernels for prompts. All matmuls of a plan share tiles of pairs, so `BLOCKS` must match them
all.
"""


def prompt_kernel(sites: Sequence[PromptSite]) -> str:
    """Return the kernel for all expert matmuls of a plan in prompts."""
    kernels = {bind(PROMPT, site).at(1) for site in sites}
    return BLOCKS if kernels == {BLOCKS} else TRITON


def tile_size(num_pairs: int, num_experts: int, *, site: ExpertsSite, is_bf16: bool) -> int:
    """Return the pairs per tile for a prompt. ``num_experts`` counts all ranks."""
    if site.arithmetic == EXACT:  # in float32 there are no registers for large tiles
        return DECODE_PAIRS
    if is_bf16 and num_pairs <= MAX_SHORT_MEAN * num_experts:
        return SHORT_PAIRS
    is_most = is_bf16 and num_pairs >= PREFILL_PAIRS * num_experts
    return MOST_PAIRS if is_most and site.gpu.has_copy_engine else PREFILL_PAIRS
