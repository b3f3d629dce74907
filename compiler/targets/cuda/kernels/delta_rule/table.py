"""Delta rule op tables: decode steps, and the systems in a prompt's chunks.

Triton has the only kernel for the rest: prompts, and convolutions without a delta rule.
"""

from __future__ import annotations

from dataclasses import dataclass

from tilewright.compiler.targets.cuda.kernels.common.table import (
    EVERY,
    EXACT,
    FAST,
    NONE,
    STRICT,
    Gpu,
    TableRow,
    bind,
)
from tilewright.compiler.targets.cuda.kernels.delta_rule import delta_solve, delta_step

STEP, SOLVE, TRITON = "delta_step.cu", "delta_solve.cu", "triton"


@dataclass(frozen=True, slots=True)
class DeltaSite:
    """A delta rule, without its row count.

    Attributes:
        arithmetic: ``exact``, ``strict`` or ``fast``.
        gpu: The table's GPU.
        num_heads: Value heads.
        num_key_heads: Key heads.
        key_dim: Channels per key.
        value_dim: Channels per value.
        width: Convolution width. 0: no convolution.
        is_aligned: Whether query, key and value rows are 16-byte aligned.
    """

    arithmetic: str
    gpu: Gpu
    num_heads: int
    num_key_heads: int
    key_dim: int
    value_dim: int
    width: int
    is_aligned: bool = True

    @property
    def kind(self) -> str:
        return "fp32"


def why_no_step(site: DeltaSite) -> str:
    """Return the reason against `STEP`. Empty: it runs."""
    if site.arithmetic == EXACT:
        return "float32 arithmetic"
    if not site.width:
        return "no convolution of its own"
    if site.key_dim != site.value_dim or site.key_dim not in delta_step.HEAD_DIMS:
        return f"keys of {site.key_dim} and values of {site.value_dim} channels"
    heads = site.num_heads, site.num_key_heads
    if not delta_step.columns_of_a_block(*heads, site.key_dim):
        return f"{heads[0]} heads over {heads[1]} of keys"
    if site.width not in delta_step.WIDTHS:
        return f"a convolution of width {site.width}"
    return site.gpu.why_no_cpp


def why_no_solve(site: DeltaSite) -> str:
    """Return the reason against `SOLVE`. Empty: it runs."""
    if not site.key_dim == site.value_dim == delta_solve.HEAD_DIM:
        return f"keys of {site.key_dim} and values of {site.value_dim} channels"
    if not site.is_aligned:
        return "rows of queries, keys and values that are not 16-byte aligned"
    return site.gpu.why_no_cpp


DELTA_STEP: tuple[TableRow[DeltaSite], ...] = (
    TableRow(STEP, ("fp32",), lambda site: NONE if why_no_step(site) else EVERY, is_cpp=True),
    TableRow(TRITON, ("fp32",)),
)
DELTA_SOLVE: tuple[TableRow[DeltaSite], ...] = (
    TableRow(
        SOLVE,
        ("fp32",),
        lambda site: NONE if why_no_solve(site) else EVERY,
        (STRICT, FAST),
        is_cpp=True,
    ),
    TableRow(TRITON, ("fp32",)),
)
"""Selection order: the first matching table row gives the kernel."""


def bind_step(site: DeltaSite) -> str:
    """Return the kernel for decode steps with any row count."""
    (kernel,) = bind(DELTA_STEP, site).values
    return kernel


def bind_solve(site: DeltaSite) -> str:
    """Return the kernel for the systems in a prompt's chunks, with any token count."""
    (kernel,) = bind(DELTA_SOLVE, site).values
    return kernel
