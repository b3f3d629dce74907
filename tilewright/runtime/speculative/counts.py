"""`SpeculationCounts`: speculative decoding counters in an engine. Imports no torch."""

from __future__ import annotations

import msgspec

PENALTIES, GRAMMAR, OPT_OUT, IMAGES = "penalties", "grammar", "opt_out", "images"
NO_NUMBER, VOCABULARY = "not_a_number", "vocabulary"
"""Reasons for a request without drafts. The last two: the logits of a draft are NaN, and the draft
model has no embedding for a token.
"""


class SpeculationCounts(msgspec.Struct):
    """Counters since the start.

    Attributes:
        num_drafts: Verified drafts.
        num_draft_tokens: Their tokens.
        num_accepted: Accepted tokens, by position in the draft.
        length: Maximum draft length in the last step.
        without_drafts: Requests without drafts, by reason.
    """

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted: list[int] = []
    length: int = 0
    without_drafts: dict[str, int] = {}
