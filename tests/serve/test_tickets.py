"""Who waits for answers: what they have not taken yet is joined, in its order."""

from __future__ import annotations

import asyncio

from tilewright.compiler.runtime.messages import Finished, Started, Submit, Tokens
from tilewright.compiler.runtime.sampling import SamplingParams
from tilewright.compiler.serve.tickets import Answer, Desk, Limits
from tilewright.compiler.targets.step import LogProbs


def test_tokens_that_nobody_has_taken_become_one_message() -> None:
    score = LogProbs(-1.0)

    async def heard() -> list[tuple[int, Answer]]:
        desk = Desk(lambda message: None, Limits())
        asked = Submit(0, (1, 2), SamplingParams(max_tokens=9))
        ticket = desk.submit([asked, asked], max_context=64)
        one, other = ticket.ids
        for message in (
            *(Started(one, 0.0, 0), Tokens(one, (5,), (score,)), Tokens(one, (6,), (score,))),
            *(Tokens(other, (7,)), Tokens(one, (8,)), Tokens(one, (9, 1))),
            Finished(one, "length", 0.0, 0.0),
        ):
            desk.hear(message)
        found = await ticket.take()
        ticket.close()
        return found

    found = asyncio.run(heard())
    assert [
        (index, message.tokens if isinstance(message, Tokens) else type(message))
        for index, message in found
    ] == [(0, Started), (0, (5, 6)), (1, (7,)), (0, (8, 9, 1)), (0, Finished)]
    joined = found[1][1]
    assert isinstance(joined, Tokens) and joined.logprobs == (score, score)
