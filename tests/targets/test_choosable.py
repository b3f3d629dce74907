"""Ids that no token has: models have logits for them, and nobody chooses them."""

from __future__ import annotations

import numpy as np
import pytest

from tests.tiny import compiled, joined, precision_of, tiny_model
from tilewright.compiler.targets.step import Choosing, Chunk, Open, Pages, Seat, Step

SEAT = Seat(0)
GREEDY, DRAWN = Choosing(), Choosing(temperature=9.0, seed=1)


@pytest.mark.parametrize("target", ["reference", "cuda"])
def test_ids_without_a_token_are_never_chosen(target: str) -> None:
    made = compiled(
        tiny_model(std=0.3), target, precision=precision_of("bfp8", "hifi4"), compute="exact"
    )
    made.num_tokens = 3
    mask = np.arange(made.vocab_size) > 1
    for choosing, is_masked in ((GREEDY, False), (DRAWN, False), (DRAWN, True)):
        made.reset()
        pages = (Pages(SEAT, 0, (0,)),) if made.capabilities.page_size else ()
        chunk = Chunk(SEAT, 0, (1, 5, 9), chooses=True)
        step = Step(edits=(Open(SEAT, choosing), *pages), prompts=(chunk,), masked=is_masked)
        for _ in range(2):
            output = made.step(step)
            if is_masked:
                made.choose(output, {SEAT: mask})
            (token,) = output.parts[0].read().tokens
            assert token == 2 if is_masked else token < 3
            step = Step(decode=(SEAT,), masked=is_masked, want_logits=True)
        assert joined(output).shape == (1, made.vocab_size), "their logits are there all the same"
    made.close()
