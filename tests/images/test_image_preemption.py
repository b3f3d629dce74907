"""Preempted chats with images, and prefixes with the same and another image, for both families."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from tests.images.test_image_chunks import COUNT, family  # noqa: F401
from tests.images.test_vision_models import chat_of, picture
from tilewright import LLM
from tilewright.runtime.scheduling.request_state import RequestState


@pytest.fixture(scope="module", params=["reference", "cpu"])
def opened(request: pytest.FixtureRequest, family: Any) -> Iterator[SimpleNamespace]:  # noqa: F811
    """A model of each family on a target, with transformers' tokens."""
    tests, model, folder = family
    exact: dict[str, Any] = {} if request.param == "reference" else {"compute": "exact"}
    options = {**exact, "precision": "reference", "use_cache": False}
    with LLM(folder, target=request.param, max_seats=2, **options) as llm:
        yield SimpleNamespace(
            llm=llm, expected=lambda parts, count: tests.expected(model, llm, parts, count)
        )


def test_a_preempted_chat_continues_with_its_image(
    opened: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The state is computed again: these targets have no pages to swap out."""
    loop, parts = opened.llm._loop, (picture(24, 40, 9), "so?")
    scheduler = loop.scheduler
    monkeypatch.setattr(scheduler.places, "_most_bytes", 0)
    decode_rows = scheduler._decode_rows
    with opened.llm.stream_chat(chat_of(*parts), max_tokens=COUNT, stop_token_ids=()) as stream:
        request = stream._request

        def preempt_once() -> list[RequestState]:
            if len(request.output) == 2 and not request.num_preemptions:
                scheduler._preempt(request)
            return decode_rows()

        monkeypatch.setattr(scheduler, "_decode_rows", preempt_once)
        loop.add(request)
        while request.finish_reason is None:
            loop.step()
    assert request.num_preemptions == 1
    assert request.output == opened.expected(parts, COUNT)


def test_a_prefix_with_another_image_is_not_shared(opened: SimpleNamespace) -> None:
    text = "a question that is longer than a page of the cache, which has sixty-four positions "
    cached = []
    for seed in (1, 1, 2):
        parts = (picture(32, 32, seed), text)
        answer = opened.llm.chat(chat_of(*parts), max_tokens=2, stop_token_ids=())
        assert list(answer.tokens) == opened.expected(parts, 2)
        cached.append(answer.num_cached_tokens)
    assert cached[1] > 20, cached
    assert cached[2] <= len("user:") + 1
