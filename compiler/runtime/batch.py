"""From pieces of requests to a StepInput: flat tokens, positions, bounds, rows that want logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from tilewright.compiler.ops import SamplingBatch
from tilewright.compiler.runtime.request import Request
from tilewright.compiler.targets.base import Capabilities, StateHandle, StepInput


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive tokens of one sequence, ``position`` being where the first of them stands."""

    state: StateHandle
    tokens: Sequence[int]
    position: int
    wants_logits: bool


def build_step(
    pieces: Sequence[Piece], *, sampling: SamplingBatch | None = None, want_logits: bool = False
) -> StepInput:
    """Builds one step over ``pieces``, with the last token's logits of those that want them."""
    bounds = [0, *accumulate(len(piece.tokens) for piece in pieces)]
    ends = zip(pieces, bounds[1:], strict=True)
    positions = [p.position + i for p in pieces for i in range(len(p.tokens))]
    return StepInput(
        tokens=torch.tensor([token for piece in pieces for token in piece.tokens]),
        positions=torch.tensor(positions),
        cu_seqlens=torch.tensor(bounds),
        logit_rows=torch.tensor([end - 1 for p, end in ends if p.wants_logits], dtype=torch.int64),
        states=tuple(piece.state for piece in pieces),
        sampling=sampling,
        want_logits=want_logits,
    )


def sampling_batch(requests: Sequence[Request]) -> SamplingBatch:
    """The sampling parameters of the requests whose next token is chosen, one row each."""
    params = [request.sampling for request in requests]
    width = max(1, *(len(p.end_tokens) for p in params))
    padded = [[*p.end_tokens, *[-1] * (width - len(p.end_tokens))] for p in params]
    return SamplingBatch(
        temperature=torch.tensor([p.temperature for p in params], dtype=torch.float32),
        top_k=torch.tensor([p.top_k for p in params]),
        top_p=torch.tensor([p.top_p for p in params], dtype=torch.float32),
        seeds=torch.tensor([p.seed for p in params]),
        positions=torch.tensor([request.num_tokens for request in requests]),
        end_tokens=torch.tensor(padded),
        is_greedy=all(p.temperature <= 0 for p in params),
    )


def split_by_capability(pieces: Sequence[Piece], capabilities: Capabilities) -> list[list[Piece]]:
    """Splits pieces into groups that can each be one step: phases apart and prefills few, unless
    the executable's steps may mix them.
    """
    if capabilities.mixed_steps:
        return [list(pieces)] if pieces else []
    decodes = [piece for piece in pieces if len(piece.tokens) == 1]
    prefills = [piece for piece in pieces if len(piece.tokens) > 1]
    size = capabilities.max_prefill_sequences
    groups = [prefills[start : start + size] for start in range(0, len(prefills), size)]
    return [*groups, decodes] if decodes else groups
