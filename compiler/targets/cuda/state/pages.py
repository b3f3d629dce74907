"""The paged key/value cache: position pages in a pool, and the table that names each slot's.

Legend: P pages, G key/value heads, L positions of a page, D head size, S slots, M pages of a slot.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tilewright.compiler.formats.block_float import BLOCK_SIZE
from tilewright.compiler.ir.state import StateSpec

PAGE = 64
"""Positions a page holds."""


@dataclass(frozen=True, slots=True)
class KVPages:
    """One layer's pages: ``values [P, 2, G, L, D]``, keys then values.

    bfloat16 or float32; or int8 signed mantissas of bfp8, with their blocks' biased exponents in
    ``exponents [P, 2, G, L, ceil(D / 16)]`` uint8: value = mantissa * 2 ** (exponent - 133).
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
    """Zeroed pages of one layer; ``kind``: ``bf16``, ``fp32`` or ``bfp8``."""
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
    """Count the pages that ``num_positions`` positions take, the last perhaps in part."""
    return -(-num_positions // PAGE)


def page_bytes(state: StateSpec, kind: str) -> int:
    """The bytes of one page of a layer."""
    _, num_kv_heads, head_dim = state.shape
    rows = 2 * num_kv_heads * PAGE
    if kind == "bfp8":
        return rows * (head_dim + -(-head_dim // BLOCK_SIZE))
    return rows * head_dim * (4 if kind == "fp32" else 2)
