"""Norm op tables, for rows and for attention heads. Excludes launches."""

from __future__ import annotations

from dataclasses import dataclass

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
from tilewright.compiler.targets.cuda.kernels.matmul import gemv, norm_linear_triton
from tilewright.compiler.targets.cuda.tuning import tuning

INSIDE, CPP, TRITON = "inside matmul", "gemv.cu", "triton"
EACH_HEAD, SEVERAL_HEADS = "a program for each head", "a program for several heads"


@dataclass(frozen=True, slots=True)
class NormSite:
    """A norm in a phase, without its number of rows.

    Attributes:
        arithmetic: ``exact``, ``strict`` or ``fast``.
        gpu: The GPU.
        decodes: Whether this is a decode step.
        fits: Whether the CUDA C++ kernels support its types, width and alignment.
        is_operand: Whether a matmul is the only reader.
        is_inside: Whether the next matmul can compute the norm.
    """

    arithmetic: str
    gpu: Gpu
    decodes: bool
    fits: bool = False
    is_operand: bool = False
    is_inside: bool = False

    @property
    def kind(self) -> str:
        return "fp32"


def _inside_rows(site: NormSite) -> range:
    if not site.decodes or not site.is_inside:
        return NONE
    if site.fits:
        return range(1, 2)
    is_triton = site.arithmetic == FAST and not site.gpu.has_cpp
    return range(1, norm_linear_triton.MAX_TOKENS + 1) if is_triton else NONE


def _cpp_rows(site: NormSite) -> range:
    """Prompts in strict arithmetic have one kernel for all numbers of rows."""
    if site.decodes or not site.fits:
        return EVERY if site.fits else NONE
    is_small = site.is_operand and site.arithmetic == FAST
    return range(1, gemv.MAX_TOKENS + 1) if is_small else NONE


def _each_head_rows(site: NormSite) -> range:
    """Single-head programs are faster for few rows. They may add in another order."""
    if site.decodes:
        return EVERY
    limit = tuning()["elementwise"]["heads_few_rows"]
    return NONE if site.arithmetic == STRICT else range(1, limit + 1)


_Kernels = tuple[TableRow[NormSite], ...]
NORM: _Kernels = (
    TableRow(INSIDE, ("fp32",), _inside_rows, (STRICT, FAST)),
    TableRow(CPP, ("fp32",), _cpp_rows, (STRICT, FAST), is_cpp=True),
    TableRow(TRITON, ("fp32",)),
)
HEADS: _Kernels = (
    TableRow(EACH_HEAD, ("fp32",), _each_head_rows),
    TableRow(SEVERAL_HEADS, ("fp32",)),
)
"""Selection order: the first matching range gives the kernel."""


def bind_norm(site: NormSite) -> Ranges[str]:
    """Return a norm's kernels by number of rows."""
    return bind(NORM, site)


def bind_heads(site: NormSite) -> Ranges[str]:
    """Return head norm kernels by number of rows."""
    return bind(HEADS, site)
