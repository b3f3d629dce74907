"""Log probabilities of prompts, as those ask for them who compare models by them."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from tests.serve.conftest import Server, post

PROMPT = [3, 9, 27, 81, 5, 25, 125]


def scored(server: Server, prompt: Any, **changes: Any) -> Any:
    body = {"prompt": prompt, "max_tokens": 1, "logprobs": 2, "echo": True, **changes}
    status, found = post(server, "/v1/completions", body)
    assert status == 200, found
    return [choice["logprobs"] for choice in found["choices"]]


def test_a_prompt_is_scored_as_its_tokens_would_be(server: Server) -> None:
    """Each token's entry is that of an answer to the tokens before it."""
    (found,) = scored(server, PROMPT)
    lengths = {len(found[key]) for key in ("tokens", "token_logprobs", "text_offset")}
    assert lengths == {len(PROMPT) + 1}
    assert found["token_logprobs"][0] is None and found["top_logprobs"][0] is None
    assert found["text_offset"] == sorted(found["text_offset"])
    for at in (1, 4, 6):
        (answer,) = scored(server, PROMPT[:at], echo=False)
        assert found["top_logprobs"][at] == pytest.approx(answer["top_logprobs"][0], abs=1e-4)
        assert found["token_logprobs"][at] <= max(found["top_logprobs"][at].values())


def test_loglikelihoods_of_continuations(server: Server) -> None:
    """As lm-eval adds them up: the last entry is the token that was chosen, whatever it is; and a
    continuation that is the likeliest one is found to be so.
    """
    _, said = post(server, "/v1/completions", {"prompt": PROMPT, "max_tokens": 4, "logprobs": 1})
    likeliest = sum(said["choices"][0]["logprobs"]["token_logprobs"])
    status, ids = post(server, "/tokenize", {"content": said["choices"][0]["text"]})
    assert status == 200 and ids["tokens"]
    body = {"prompt": PROMPT, "max_tokens": 4, "return_token_ids": True}
    tokens = post(server, "/v1/completions", body)[1]["choices"][0]["token_ids"]
    whole = [[*PROMPT, *tokens], [*PROMPT, *reversed(tokens)]]
    best, other = scored(server, whole, logprobs=1, temperature=0, seed=1234)
    sums = [sum(each["token_logprobs"][len(PROMPT) : -1]) for each in (best, other)]
    assert sums[0] == pytest.approx(likeliest, abs=1e-3) and sums[1] <= sums[0]
    for value, top in zip(best["token_logprobs"][7:-1], best["top_logprobs"][7:-1], strict=True):
        assert value == max(top.values())


def test_a_text_is_echoed_with_its_offsets_and_streams_too(server: Server) -> None:
    text = "hello, world"
    body = {"prompt": text, "max_tokens": 3, "logprobs": 0, "echo": True, "n": 2}
    _, found = post(server, "/v1/completions", body)
    for choice in found["choices"]:
        logs = choice["logprobs"]
        assert choice["text"].startswith(text)
        count = len(logs["tokens"]) - 3
        starts = logs["text_offset"][: count + 1]
        pieces = [text[a:b] for a, b in itertools.pairwise(starts)]
        assert "".join(pieces) == text and pieces == logs["tokens"][:count]
        assert logs["top_logprobs"][0] is None and logs["top_logprobs"][1] == {}
