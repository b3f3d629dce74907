"""Draft acceptance: from sampled tokens to emitted tokens by slot."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from tilewright.compiler.targets.host.choice import log_probs
from tilewright.compiler.targets.interface.step import SampledTokens


def accept_drafts(
    sampled: SampledTokens,
    drafts: Sequence[tuple[int, ...]],
    *,
    logits: Tensor | None = None,
    num_top: int | None = None,
) -> SampledTokens:
    """Return the emitted tokens by slot.

    A slot emits sampled tokens until a draft differs from the sampled token.

    Args:
        sampled: A token per input token, in slot order.
        drafts: Draft tokens by slot. A slot with k drafts has k + 1 rows.
        logits: float32 ``[rows, vocabulary]`` on the host, for log probabilities.
        num_top: Value of `Step.logprobs`.
    """
    rows: list[int] = []
    counts: list[int] = []
    first = 0
    for draft in drafts:
        count = 1
        while count <= len(draft) and draft[count - 1] == sampled.tokens[first + count - 1]:
            count += 1
        rows.extend(range(first, first + count))
        counts.append(count)
        first += 1 + len(draft)
    tokens, why = [sampled.tokens[at] for at in rows], [sampled.why[at] for at in rows]
    scores = None
    if num_top is not None:
        assert logits is not None
        scores = log_probs(logits[rows].numpy(), tokens, num_top)
    return SampledTokens(tokens, why, scores, counts=counts)
