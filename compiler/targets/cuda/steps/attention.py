"""Attention in a step: decode rows on paged kernels, prefill on cuDNN or our own kernels.

Legend: B decode rows, T prompt tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tilewright.compiler.targets.cuda.kernels.attention import attention as native_attention
from tilewright.compiler.targets.cuda.kernels.attention import decode_triton as attention_decode
from tilewright.compiler.targets.cuda.kernels.attention import prefill_triton as attention_prefill
from tilewright.compiler.targets.cuda.kernels.attention import split as attention_shares
from tilewright.compiler.targets.cuda.kernels.attention.rope import rotate_and_store
from tilewright.compiler.targets.cuda.kernels.attention.rotate_offsets import rotate_offsets
from tilewright.compiler.targets.cuda.kernels.attention.split import SplitKV, Spread
from tilewright.compiler.targets.cuda.kernels.attention.table import (
    CPP,
    CUDNN,
    AttentionSite,
    bind_decode,
    bind_prompt,
    bind_splits,
    why_no_cpp,
)
from tilewright.compiler.targets.cuda.kernels.common import nvrtc
from tilewright.compiler.targets.cuda.kernels.common.table import EXACT, FAST, Gpu, Ranges
from tilewright.compiler.targets.cuda.lowering import has_mixers
from tilewright.compiler.targets.cuda.state.pages import KVPages
from tilewright.compiler.targets.cuda.state.tables import PagedState
from tilewright.compiler.targets.cuda.state.token_batch import ChunkLayout, TokenBatch
from tilewright.compiler.targets.cuda.steps.buffers import Buffers
from tilewright.compiler.targets.cuda.steps.cublas import attend_from_start
from tilewright.compiler.targets.cuda.weights.stream import Weights
from tilewright.compiler.targets.program.instructions import AttentionOp, KernelProgram

_STORES = {"share": SplitKV(num_groups=1, num_joined=1, each_block=1)}
"""A block per token and key/value head, enough for a single-position window."""


@dataclass(frozen=True, slots=True)
class _BoundAttention:
    """A layer's attention with all values known at load.

    Attributes:
        pages: The layer's pages.
        inv_freq: Rotation frequencies.
        given: Options for all kernels.
        attend: Decode kernel.
        splits: Decode splits by reach. Empty: the kernel has none.
        prompt: Kernels for prompts from their first position.
    """

    pages: KVPages
    inv_freq: Tensor
    given: dict[str, Any]
    attend: Callable[..., None]
    splits: dict[int, Ranges[SplitKV | Spread]]
    prompt: Ranges[str]


class AttentionRunner:
    """Runs a program's attention, with its scratch memory.

    ``arithmetic``: ``strict`` gives a decode row the same bits in each batch, and a prompt token
    the same bits in chunks with any length.
    """

    def __init__(
        self,
        plan: KernelProgram,
        weights: Weights,
        state: PagedState,
        *,
        gpu: Gpu,
        arithmetic: str,
        max_rows: int,
    ) -> None:
        self._weights, self._state = weights, state
        self._operand = torch.float32 if arithmetic == EXACT else torch.bfloat16
        attends = [each for each in plan.instructions if isinstance(each, AttentionOp)]
        sites = [self._site_of(each, gpu, arithmetic) for each in attends]
        self.why_not_native = next(filter(None, map(why_no_cpp, sites)), "")
        device, num_pages = state.tables.device, state.tables.shape[1]
        is_own = bool(attends) and not self.why_not_native
        self.reaches: tuple[int, ...] = (num_pages,)
        """Captured page counts, ascending. A decode step uses the smallest count for its longest
        row.
        """
        if is_own and not has_mixers(plan):
            self.reaches = attention_shares.reaches_of(num_pages)
        self._decode_scratch = self._prompt_scratch = None
        self._bound: dict[int, _BoundAttention] = {}
        if not attends:
            return
        most = max(attends, key=lambda each: each.num_heads * each.state.shape[-1])
        heads, width = most.num_heads, most.state.shape[-1]
        parts = min(num_pages, attention_shares.MAX_GROUPS) if is_own else num_pages
        self._decode_scratch = attention_decode.decode_scratch(
            max_rows, heads, width, parts, device
        )
        if gpu.has_cpp and arithmetic == FAST:
            heads = max(each.num_heads for each in attends)
            width = max(each.state.shape[-1] for each in attends)
            self._prompt_scratch = attention_prefill.PrefillScratch.empty(heads, width, device)
        if any(bind_decode(site) == CPP for site in sites):
            nvrtc.load(device, native_attention.SOURCE)
        splits: dict[AttentionSite, dict[int, Ranges[SplitKV | Spread]]] = {}
        for each, site in zip(attends, sites, strict=True):
            if site not in splits:
                splits[site] = self._splits_of(site, max_rows)
            self._bound[id(each)] = self._bind(each, site, splits[site])

    def _site_of(self, each: AttentionOp, gpu: Gpu, arithmetic: str) -> AttentionSite:
        pages = self._state.pages[each.state.name]
        kinds = {torch.bfloat16: "bf16", torch.int8: "bfp8"}
        return AttentionSite(
            kinds.get(pages.values.dtype, "fp32"),
            arithmetic,
            gpu,
            num_heads=each.num_heads,
            num_kv_heads=pages.num_kv_heads,
            head_dim=pages.head_dim,
            num_frequencies=math.prod(each.inv_freq.shape),
            window=each.window,
            has_gaps=bool(each.qkv.stride),
            is_whole=True,
            has_sinks=each.sinks is not None,
        )

    def _splits_of(self, site: AttentionSite, max_rows: int) -> dict[int, Ranges[SplitKV | Spread]]:
        if bind_decode(site) != CPP:
            return {}
        reaches = {*self.reaches, self._state.tables.shape[1]}
        return {reach: bind_splits(site, reach, max_rows) for reach in reaches}

    def _bind(
        self, each: AttentionOp, site: AttentionSite, splits: dict[int, Ranges[SplitKV | Spread]]
    ) -> _BoundAttention:
        attend: Callable[..., None] = native_attention.attend_decode
        if not splits:
            is_fast = site.arithmetic == FAST and not site.gpu.has_cpp
            attend = partial(attention_decode.attend_decode, is_fast=is_fast)
        given = {"block_tables": self._state.tables, "scale": each.scale, "window": each.window}
        if each.sinks is not None:
            given["sinks"] = self._weights.constant(each.sinks)
        return _BoundAttention(
            self._state.pages[each.state.name],
            self._weights.constant(each.inv_freq),
            given,
            attend,
            splits,
            bind_prompt(site),
        )

    def _add_offsets(self, op: AttentionOp, qkv: Tensor, rows: TokenBatch) -> None:
        """Rotate queries and keys by the rows' offsets, before attention rotates by position."""
        if rows.offsets is not None:
            bound = self._bound[id(op)]
            rotate_offsets(
                qkv,
                rows.offsets,
                bound.inv_freq,
                num_heads=op.num_heads + bound.pages.num_kv_heads,
                head_dim=bound.pages.head_dim,
                interleaved=op.interleaved,
            )

    def begins_otherwise(self, num_tokens: int) -> bool:
        """Return whether a prompt of this length uses another kernel from its first position."""
        return any(each.prompt.at(num_tokens) == CUDNN for each in self._bound.values())

    def arranges(self, op: AttentionOp) -> bool:
        """Return whether the decode kernel can write the next matmul's x."""
        return bool(self._bound[id(op)].splits)

    def decode(
        self,
        each: AttentionOp,
        step: Buffers,
        rows: TokenBatch,
        *,
        reach: int | None,
        captured: bool,
        has_drafts: bool = False,
        arranged: native_attention.ArrangedOutput | None = None,
    ) -> None:
        """Run a token for each of B sequences with up to ``reach`` pages. None: any number. See
        :meth:`.runner.StepRunner.decode` for ``captured`` and ``has_drafts``.

        ``arranged``: Output in place of the step's buffer, if :meth:`arranges`.
        """
        bound, qkv = self._bound[id(each)], step.view(each.qkv)
        self._add_offsets(each, qkv, rows)
        options = bound.given
        if bound.splits:
            splits = bound.splits[reach or self._state.tables.shape[1]]
            options = {**options, "share": splits.at(len(qkv))}
        attend = partial(
            bound.attend,
            bound.pages,
            qkv,
            out=step.view(each.out) if arranged is None else arranged,
            positions=rows.positions,
            slots=rows.slots,
            inv_freq=bound.inv_freq,
            num_heads=each.num_heads,
            interleaved=each.interleaved,
            scratch=self._decode_scratch,
            early=captured,
        )
        if has_drafts:
            # The kernel stores keys and values while it reads pages. A first launch with a
            # single-position window stores all of them, with the same bits.
            attend(**{**options, **(_STORES if bound.splits else {}), "window": 1})
        attend(**options)

    def prompt(
        self,
        each: AttentionOp,
        step: Buffers,
        rows: TokenBatch,
        *,
        from_start: bool,
        layout: ChunkLayout,
        only_stores: bool = False,
    ) -> None:
        """Run T prompt tokens. See :meth:`.runner.StepRunner.prefill` for ``from_start``.

        ``only_stores``: Store keys and values without attention.
        """
        bound, qkv = self._bound[id(each)], step.view(each.qkv)
        self._add_offsets(each, qkv, rows)
        num_tokens, head_dim, device = len(qkv), each.state.shape[-1], qkv.device
        q = torch.empty(num_tokens, each.num_heads, head_dim, dtype=self._operand, device=device)
        k = v = None
        is_plain = from_start and rows.ends is None and not only_stores
        if is_plain and bound.prompt.at(num_tokens) == CUDNN:
            k = q.new_empty(num_tokens, *each.state.shape[1:])
            v = torch.empty_like(k)
        rotate_and_store(
            bound.pages,
            qkv,
            q_out=q,
            k_out=k,
            v_out=v,
            positions=rows.positions,
            slots=rows.slots,
            block_tables=self._state.tables,
            inv_freq=bound.inv_freq,
            num_heads=each.num_heads,
            interleaved=each.interleaved,
        )
        if only_stores:
            return
        if k is not None and v is not None:
            step.put(each.out, attend_from_start(q, k, v, each.scale))
            return
        attention_prefill.attend_prefill(
            bound.pages,
            q,
            out=step.view(each.out),
            positions=rows.positions,
            slots=rows.slots,
            starts=layout.starts,
            is_short=layout.is_short,
            scratch=self._prompt_scratch,
            ends=rows.ends,
            **bound.given,
        )
