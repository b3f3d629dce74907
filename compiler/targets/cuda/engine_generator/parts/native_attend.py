"""Attention of decode steps in CUDA C++."""

from __future__ import annotations

import math

from torch import Tensor

from tilewright.compiler.targets.cuda.engine_generator.parts.launches import CudaKernels, Tokens
from tilewright.compiler.targets.cuda.engine_generator.parts.native_cuda import (
    native_launch,
    takes_native,
)
from tilewright.compiler.targets.cuda.engine_generator.parts.steps import Bound
from tilewright.compiler.targets.cuda.kernels.attention.attention import (
    _WARPS,
    _Attend,
    _shared_bytes,
)
from tilewright.compiler.targets.cuda.kernels.attention.split import (
    SHORT_PAGES,
    choose_share,
    num_parts,
)

FEW_PAGES = 8
"""Pages of a row, up to which each has a block of its own: those before `SPLIT_FROM`."""

MOST_ROWS = 8
"""With more rows, or parts of long contexts, Triton's kernel was measured faster."""


class NativeAttention(CudaKernels):
    """Attention of one token a row: its pages are shared out between the blocks of a cluster."""

    def _attend_tokens(self, each: Bound, qkv: Tensor, batch: Tokens, out: Tensor) -> None:
        s, table = self.settings, batch.table
        heads = s.num_heads // s.num_kv_heads
        known = s.head_dim in (64, 128, 256) and heads <= 16
        known = known and len(qkv) <= MOST_ROWS and batch.splits == 1
        if not (known and takes_native(self.device, qkv.dtype)):
            super()._attend_tokens(each, qkv, batch, out)
            return
        assert table is not None and batch.positions is not None and batch.seats is not None
        pages = min(table.shape[1], FEW_PAGES)
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
            group_splits=share.group_splits,
            short_pages=SHORT_PAGES,
            scale=s.scale / math.log(2),
        )
        eights = 1 if heads <= 8 else 2
        native_launch(
            (
                "attention.cu",
                f"KERNELS(bf16, BF16, {s.head_dim}, {eights})",
                f"attend_bf16_{s.head_dim}_{eights}",
            ),
            arguments,
            blocks=(share.num_joined, len(qkv), s.num_kv_heads),
            threads=32 * _WARPS * num_parts(s.head_dim),
            shared=_shared_bytes(s.head_dim, heads, share.group_splits),
            cluster=(share.num_joined, 1, 1),
            chained=self.chained,
        )
