"""Attention op tables: decode steps and prompts. Excludes launches."""

from __future__ import annotations

from dataclasses import dataclass

from tilewright.compiler.targets.cuda.kernels.attention.attention import HEAD_DIMS, MAX_GROUP_HEADS
from tilewright.compiler.targets.cuda.kernels.attention.split import (
    SplitKV,
    Spread,
    share_of_step,
)
from tilewright.compiler.targets.cuda.kernels.common.table import (
    EVERY,
    FAST,
    NONE,
    STRICT,
    Gpu,
    Ranges,
    TableRow,
    bind,
)
from tilewright.compiler.targets.cuda.tuning import tuning

CPP, CUDNN, TRITON = "attention.cu", "cudnn", "triton"

_PAGES = ("bf16", "bfp8")
_FORMATS = (*_PAGES, "fp32")


@dataclass(frozen=True, slots=True)
class AttentionSite:
    """A layer's attention, without its row count.

    Attributes:
        kind: Page format.
        arithmetic: ``exact``, ``strict`` or ``fast``.
        gpu: The GPU.
        num_heads: Query heads.
        num_kv_heads: Key and value heads.
        head_dim: Channels per head.
        num_frequencies: Rotated channel pairs.
        window: Sliding window in positions. 0: none.
        has_gaps: Whether q, k and v are between other columns.
        is_whole: Whether the tokens are a prompt from its first position.
        has_sinks: Whether each head has a further score without a value.
    """

    kind: str
    arithmetic: str
    gpu: Gpu
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_frequencies: int
    window: int = 0
    has_gaps: bool = False
    is_whole: bool = False
    has_sinks: bool = False


def why_no_cpp(site: AttentionSite) -> str:
    """Return the reason against `CPP`. Empty: it runs."""
    if site.has_sinks:
        return "sinks"
    if site.has_gaps:
        return "q, k and v between other columns"
    if site.kind not in _PAGES:
        return "pages of torch.float32"
    if site.head_dim not in HEAD_DIMS:
        return f"head size {site.head_dim}"
    if site.num_heads > MAX_GROUP_HEADS * site.num_kv_heads:
        return f"{site.num_heads} heads over {site.num_kv_heads} of keys and values"
    if site.num_frequencies % 4:
        return f"{site.num_frequencies} frequencies of rotation"
    return site.gpu.why_no_cpp


def _library_rows(site: AttentionSite) -> range:
    """cuDNN is faster for long prompts without a context."""
    limits = tuning()["attention"]["library"]
    is_gpu = site.gpu.capability != (0, 0)
    takes = (
        site.is_whole
        and not site.window
        and not site.has_sinks
        and site.head_dim <= limits["max_head_dim"]
    )
    return range(limits["min_rows"], EVERY.stop) if is_gpu and takes else NONE


DECODE: tuple[TableRow[AttentionSite], ...] = (
    TableRow(CPP, _PAGES, lambda site: NONE if why_no_cpp(site) else EVERY, is_cpp=True),
    TableRow(TRITON, _FORMATS),
)
PROMPT: tuple[TableRow[AttentionSite], ...] = (
    TableRow(CUDNN, _FORMATS, _library_rows, (FAST,)),
    TableRow(TRITON, _FORMATS),
)
"""Selection order: the first table row with a matching range gives the kernel."""


def bind_decode(site: AttentionSite) -> str:
    """Return the kernel for decode steps with any row count."""
    (kernel,) = bind(DECODE, site).values
    return kernel


def bind_prompt(site: AttentionSite) -> Ranges[str]:
    """Return the prompt kernels by token count."""
    return bind(PROMPT, site)


def bind_splits(site: AttentionSite, num_pages: int, max_rows: int) -> Ranges[SplitKV | Spread]:
    """Return the splits for `CPP` by row count, with ``num_pages`` per table."""
    is_strict, spreads = site.arithmetic == STRICT, site.kind == "bf16"
    sizes = site.num_kv_heads, num_pages, site.head_dim
    return Ranges.of(
        (count, share_of_step(count, *sizes, strict=is_strict, spreads=spreads))
        for count in range(1, max_rows + 1)
    )
