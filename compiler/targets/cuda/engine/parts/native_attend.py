"""Attention of decode steps in CUDA C++."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from tilewright.compiler.targets.cuda.engine.parts.launches import CudaKernels, Tokens
from tilewright.compiler.targets.cuda.engine.parts.native_cuda import native_launch, takes_native
from tilewright.compiler.targets.cuda.engine.parts.steps import Bound
from tilewright.compiler.targets.cuda.kernels.native_attention import (
    _WARPS,
    SHORT_PAGES,
    _Attend,
    _num_parts,
    _shared_bytes,
    choose_share,
)

FEW_PAGES = 8
"""Pages of a row, up to which attention is not cut into parts: each has a block."""


class NativeAttention(CudaKernels):
    """Attention of one token a row: its pages are shared out between the blocks of a cluster."""

    def __init__(self, *given: Any) -> None:
        self._arrived: dict[int, Tensor] = {}  # by rows: zeros between launches
        super().__init__(*given)

    def _attend_tokens(self, each: Bound, qkv: Tensor, batch: Tokens, out: Tensor) -> None:
        s, table = self.settings, batch.table
        heads = s.num_heads // s.num_kv_heads
        known = s.head_dim in (64, 128, 256) and heads <= 16
        if not (known and takes_native(self.device, qkv.dtype)):
            super()._attend_tokens(each, qkv, batch, out)
            return
        assert table is not None and batch.positions is not None and batch.seats is not None
        pages = table.shape[1] if batch.splits > 1 else min(table.shape[1], FEW_PAGES)
        share = choose_share(len(qkv), s.num_kv_heads, pages, s.head_dim)
        arguments = _Attend(
            qkv=qkv.data_ptr(),
            out=out.data_ptr(),
            positions=batch.positions.data_ptr(),
            slots=batch.seats.data_ptr(),
            tables=table.data_ptr(),
            inv_freq=self.turns.data_ptr(),
            values=self.pages.base.data_ptr() + self._layer_offset(each) * qkv.itemsize,
            table_width=table.shape[1],
            out_stride=out.stride(0),
            group_heads=heads,
            num_kv_heads=s.num_kv_heads,
            half=s.head_dim // 2,
            interleaved=s.interleaved,
            early=self.chained,
            num_groups=share.num_groups,
            num_joined=share.num_joined,
            short_pages=SHORT_PAGES,
            scale=s.scale / math.log(2),
        )
        kept = self._scratch(arguments, len(qkv), share.num_groups)
        eights = 1 if heads <= 8 else 2
        way = "attend" if share.num_begun == share.num_groups else "walk"
        native_launch(
            (
                "attention.cu",
                f"KERNELS(bf16, BF16, {s.head_dim}, {eights})",
                f"{way}_bf16_{s.head_dim}_{eights}",
            ),
            arguments,
            blocks=(share.num_joined, len(qkv), s.num_kv_heads * share.num_begun),
            threads=32 * _WARPS * _num_parts(s.head_dim),
            shared=_shared_bytes(s.head_dim, heads, share.num_joined * share.each_block),
            cluster=(share.num_joined, 1, 1),
            chained=self.chained,
        )
        del kept  # until the launch

    def _scratch(self, arguments: Any, num_rows: int, num_groups: int) -> tuple[Tensor, ...]:
        """Where groups of parts leave their sums, if there are several."""
        s = self.settings
        if num_groups == 1:
            return ()
        count = num_rows * s.num_heads * num_groups
        made = [torch.empty(count * n, device=self.device) for n in (s.head_dim, 1, 1)]
        arguments.partial, arguments.peaks, arguments.totals = (x.data_ptr() for x in made)
        if num_rows not in self._arrived:  # before a step is captured
            zeros = torch.zeros(num_rows * s.num_kv_heads, dtype=torch.int32, device=self.device)
            self._arrived[num_rows] = zeros
        arguments.arrived = self._arrived[num_rows].data_ptr()
        return tuple(made)
