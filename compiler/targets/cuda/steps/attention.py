"""Attention of a step: rows that decode over their pages, and prompts by the library's or our own.

Legend: B rows of a decode step, T tokens of a prompt.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch

from tilewright.compiler.targets.cuda.kernels.attention import attention as native_attention
from tilewright.compiler.targets.cuda.kernels.attention import decode_triton as attention_decode
from tilewright.compiler.targets.cuda.kernels.attention import prefill_triton as attention_prefill
from tilewright.compiler.targets.cuda.kernels.attention import split as attention_shares
from tilewright.compiler.targets.cuda.kernels.attention.rope import rotate_and_store
from tilewright.compiler.targets.cuda.plan import has_mixers
from tilewright.compiler.targets.cuda.state.tables import PagedState
from tilewright.compiler.targets.cuda.state.token_batch import Rows
from tilewright.compiler.targets.cuda.steps.buffers import Buffers
from tilewright.compiler.targets.cuda.steps.cublas import attend_from_start
from tilewright.compiler.targets.cuda.weights.stream import Weights
from tilewright.compiler.targets.program.instructions import Attend, Plan

LIBRARY_ATTENTION = 512
"""Prompts longer than this, from their first position, attend through the library."""

LIBRARY_HEAD_DIM = 256
"""Heads are at most so wide there."""


class Attention:
    """Runs the attention of a plan, with its scratch memory.

    ``strict``: a row that decodes has the same bits among any others, and a prompt's token in
    pieces of any length.
    """

    def __init__(
        self,
        plan: Plan,
        weights: Weights,
        state: PagedState,
        *,
        exact: bool,
        strict: bool,
        is_native: bool,
        max_rows: int,
    ) -> None:
        self._weights, self._state = weights, state
        self._exact, self._strict = exact, strict
        self._operand = torch.float32 if exact else torch.bfloat16
        self._attends = attends = [each for each in plan.instructions if isinstance(each, Attend)]
        self.why_not_native = next(filter(None, map(self._why_not_native, attends)), "")
        device, num_pages = state.tables.device, state.tables.shape[1]
        is_own = bool(attends) and not self.why_not_native
        self.reaches: tuple[int, ...] = (num_pages,)
        """Pages that the longest row of a decode step has, at most: steps differ by them."""
        if is_own and not has_mixers(plan):
            self.reaches = attention_shares.reaches_of(num_pages)
        self._decode_scratch = self._prompt_scratch = None
        if not attends:
            return
        most = max(attends, key=lambda each: each.num_heads * each.state.shape[-1])
        heads, width = most.num_heads, most.state.shape[-1]
        parts = min(num_pages, attention_shares.MAX_GROUPS) if is_own else num_pages
        self._decode_scratch = attention_decode.decode_scratch(
            max_rows, heads, width, parts, device
        )
        if is_native and not strict:
            heads = max(each.num_heads for each in attends)
            width = max(each.state.shape[-1] for each in attends)
            self._prompt_scratch = attention_prefill.Scratch.empty(heads, width, device)

    def _why_not_native(self, each: Attend) -> str:
        if self._state.tables.device.type != "cuda":
            return "no GPU"
        if each.qkv.stride:
            return "q, k and v between other columns"
        return native_attention.why_not(
            self._state.pages[each.state.name],
            num_heads=each.num_heads,
            num_frequencies=math.prod(each.inv_freq.shape),
        )

    def begins_otherwise(self, num_tokens: int) -> bool:
        """Whether a prompt of so many tokens attends in another way from its first position on."""
        return any(self._is_by_library(each, num_tokens) for each in self._attends)

    def _is_by_library(self, each: Attend, num_tokens: int) -> bool:
        is_gpu = self._state.tables.device.type == "cuda" and not (self._exact or self._strict)
        is_whole = not each.window and each.state.shape[-1] <= LIBRARY_HEAD_DIM
        return is_gpu and is_whole and num_tokens > LIBRARY_ATTENTION

    def decode(
        self, each: Attend, step: Buffers, rows: Rows, *, reach: int | None, captured: bool
    ) -> None:
        """One token of each of B sequences, none of which has more than ``reach`` pages (None: any
        number); ``captured`` as :meth:`.steps.Steps.decode` has it.
        """
        assert self._decode_scratch is not None
        pages, qkv = self._state.pages[each.state.name], step.view(each.qkv)
        attend: Callable[..., None] = attention_decode.attend_decode
        if not self._why_not_native(each):
            share = attention_shares.share_of_step(
                len(qkv), pages.num_kv_heads, reach or self._state.tables.shape[1], pages.head_dim,
                strict=self._strict, spreads=pages.exponents is None,
            )  # fmt: skip
            attend = partial(native_attention.attend_decode, share=share)
        attend(
            pages,
            qkv,
            out=step.view(each.out),
            positions=rows.positions,
            slots=rows.slots,
            block_tables=self._state.tables,
            inv_freq=self._weights.constant(each.inv_freq),
            num_heads=each.num_heads,
            scale=each.scale,
            window=each.window,
            interleaved=each.interleaved,
            scratch=self._decode_scratch,
            early=captured,
        )

    def prompt(
        self, each: Attend, step: Buffers, rows: Rows, *, from_start: bool, block: int
    ) -> None:
        """T tokens of prompts; ``from_start`` and ``block`` as :meth:`.steps.Steps.prefill`."""
        pages, qkv = self._state.pages[each.state.name], step.view(each.qkv)
        num_tokens, head_dim, device = len(qkv), each.state.shape[-1], qkv.device
        q = torch.empty(num_tokens, each.num_heads, head_dim, dtype=self._operand, device=device)
        k = v = None
        if from_start and self._is_by_library(each, num_tokens):
            k = q.new_empty(num_tokens, *each.state.shape[1:])
            v = torch.empty_like(k)
        rotate_and_store(
            pages,
            qkv,
            q_out=q,
            k_out=k,
            v_out=v,
            positions=rows.positions,
            slots=rows.slots,
            block_tables=self._state.tables,
            inv_freq=self._weights.constant(each.inv_freq),
            num_heads=each.num_heads,
            interleaved=each.interleaved,
        )
        if k is not None and v is not None:
            step.put(each.out, attend_from_start(q, k, v, each.scale))
            return
        attention_prefill.attend_prefill(
            pages,
            q,
            out=step.view(each.out),
            positions=rows.positions,
            slots=rows.slots,
            block_tables=self._state.tables,
            scale=each.scale,
            window=each.window,
            block=block,
            scratch=self._prompt_scratch,
        )
