"""Paged key/value cache: a pool of pages with positions, and a page table per slot.

Legend: P pages, G key/value heads, L positions per page, D head size, S slots, M pages per slot.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tilewright.compiler.formats.block_float import BLOCK_SIZE
from tilewright.compiler.ir.state import StateSpec

PAGE = 64
"""Positions per page."""


@dataclass(frozen=True, slots=True)
class KVPages:
    """Pages for a layer: ``values [P, 2, G, L, D]``, keys then values.

    Values are bfloat16, float32, or int8 mantissas for bfp8. Then ``exponents [P, 2, G, L,
    ceil(D / 16)]`` uint8 has biased exponents, and a value is ``mantissa * 2 ** (exponent - 133)``.
    """

    values: Tensor
    exponents: Tensor | None = None

    @property
    def num_kv_heads(self) -> int:
        return self.values.shape[2]

    @property
    def head_dim(self) -> int:
        return self.values.shape[4]

    @property
    def num_bytes(self) -> int:
        exponents = 0 if self.exponents is None else self.exponents.nbytes
        return self.values.nbytes + exponents


def allocate_pages(
    num_pages: int, num_kv_heads: int, head_dim: int, *, kind: str, device: torch.device
) -> KVPages:
    """Allocate zeroed pages for a layer. ``kind`` is ``bf16``, ``fp32`` or ``bfp8``."""
    shape = (num_pages, 2, num_kv_heads, PAGE, head_dim)
    if kind != "bfp8":
        dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[kind]
        return KVPages(torch.zeros(shape, dtype=dtype, device=device))
    blocks = (*shape[:-1], -(-head_dim // BLOCK_SIZE))
    return KVPages(
        torch.zeros(shape, dtype=torch.int8, device=device),
        torch.zeros(blocks, dtype=torch.uint8, device=device),
    )


def pages_of(num_positions: int) -> int:
    """Return the pages for ``num_positions`` positions, including a partial page."""
    return -(-num_positions // PAGE)


def page_bytes(state: StateSpec, kind: str) -> int:
    """Return the bytes of a page in a layer."""
    _, num_kv_heads, head_dim = state.shape
    rows = 2 * num_kv_heads * PAGE
    if kind == "bfp8":
        return rows * (head_dim + -(-head_dim // BLOCK_SIZE))
    return rows * head_dim * (4 if kind == "fp32" else 2)
