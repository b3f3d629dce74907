"""Drafts from a second model: equal outputs, and the follow-up of rejected tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from tests.runtime.queued import QueuedExecutable
from tests.runtime.test_scheduler import answer
from tests.tiny import compiled, random_tokens, tiny_model
from tilewright.compiler.sampling.params import SamplingParams
from tilewright.compiler.targets.host.batch import Batch
from tilewright.runtime.loop import EngineLoop
from tilewright.runtime.scheduling.request_state import RequestState, SchedulerConfig
from tilewright.runtime.speculative.config import SpeculativeConfig
from tilewright.runtime.speculative.draft_model import DraftModel

CONFIG = SpeculativeConfig(method="draft_model", model="m", max_drafts=3, schedule=((1, 9, 3),))


def requests_of(count: int) -> list[RequestState]:
    return [
        RequestState(
            number,
            tuple(random_tokens(4 + number, seed=number)),
            SamplingParams(max_tokens=9 + number, temperature=0.6 * (number % 2), seed=number),
        )
        for number in range(count)
    ]


@pytest.mark.parametrize("std", [0.3, 0.2], ids=["same model", "other model"])
def test_drafts_of_a_model_leave_the_output_unchanged(std: float) -> None:
    """The draft model has two slots for four requests."""
    how: dict[str, Any] = {"compute": "exact", "num_threads": 1}
    target = compiled(tiny_model(std=0.3), "cpu-native", max_batch=4, **how)
    draft = compiled(tiny_model(std=std), "cpu-native", max_batch=2, **how)
    plain, drafted = requests_of(4), requests_of(4)
    EngineLoop(target).generate(plain)
    model = DraftModel(draft)
    policy = SchedulerConfig(speculative=CONFIG)
    loop = EngineLoop(target, policy=policy, draft_model=model)
    loop.generate(drafted)
    assert [request.output for request in drafted] == [request.output for request in plain]
    counts = loop.scheduler.speculator.counts
    greedy = [
        request for request in drafted if request.num_draft_tokens and request.request_id % 2 < 1
    ]
    if std == 0.3:  # a draft equals the greedy output
        assert all(each.num_accepted_tokens == each.num_draft_tokens for each in greedy)
    assert counts.num_drafts and greedy
    model.close()
    target.close()


def test_a_draft_model_that_fails_costs_no_request(capsys: pytest.CaptureFixture[str]) -> None:
    class Failing:
        num_calls = 0

        def propose(self, counts: dict[RequestState, int]) -> dict[RequestState, tuple[int, ...]]:
            self.num_calls += 1
            raise MemoryError("no room")

        def __getattr__(self, name: str) -> Any:
            return lambda *given: None

    how: dict[str, Any] = {"compute": "exact", "num_threads": 1}
    target = compiled(tiny_model(std=0.3), "cpu-native", max_batch=4, **how)
    plain, drafted, model = requests_of(4), requests_of(4), Failing()
    EngineLoop(target).generate(plain)
    policy = SchedulerConfig(speculative=CONFIG)
    loop = EngineLoop(target, policy=policy, draft_model=model)  # type: ignore[arg-type]
    loop.generate(drafted)
    assert [request.output for request in drafted] == [request.output for request in plain]
    speculator = loop.scheduler.speculator
    assert model.num_calls == 1 and speculator.has_counts and not speculator.counts.length
    assert capsys.readouterr().err.count("no room); decoding goes on without them") == 1
    target.close()


def test_logits_of_drafts_that_are_no_numbers_end_the_drafts_of_a_request(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The second step of each draft has NaN, and later the first step too."""
    how: dict[str, Any] = {"compute": "exact"}
    target = compiled(tiny_model(std=0.3), **how)
    draft: Any = compiled(tiny_model(std=0.3), **how)
    plain, drafted, forward = requests_of(4), requests_of(4), draft.forward
    EngineLoop(target).generate(plain)
    sizes = list[int]()

    def with_nan(batch: Batch) -> np.ndarray:
        logits = forward(batch)
        return logits * np.nan if batch.decodes or len(sizes) > 4 else logits

    draft.forward = with_nan
    policy = SchedulerConfig(speculative=CONFIG)
    model = DraftModel(draft)
    loop = EngineLoop(target, policy=policy, draft_model=model)
    propose = model.propose

    def counted(counts: Mapping[RequestState, int]) -> dict[RequestState, tuple[int, ...]]:
        drafts = propose(counts)
        sizes.extend(map(len, drafts.values()))
        return drafts

    model.propose = counted  # type: ignore[method-assign]
    loop.generate(drafted)
    assert [request.output for request in drafted] == [request.output for request in plain]
    assert set(sizes) == {0, 1} and sizes.count(0) == 4, "no request is asked again"
    assert loop.scheduler.speculator.counts.without_drafts == {"not_a_number": 4}
    assert capsys.readouterr().err.count("\n") == 1


def test_a_draft_model_drafts_only_tokens_of_the_target() -> None:
    target, draft = (QueuedExecutable(page_size=4, num_pages=64) for _ in range(2))
    target.vocab_size = 9
    EngineLoop(target, draft_model=DraftModel(draft))
    assert draft.num_choosable == 9


def test_a_draft_model_reads_only_tokens_with_an_embedding() -> None:
    draft = QueuedExecutable(page_size=4, num_pages=64)
    draft.vocab_size = 9
    model = DraftModel(draft)
    requests = [RequestState(0, prompt, output=[1]) for prompt in ((1, 9), (1, 8))]
    sizes = {each: len(draft) for each, draft in model.propose(dict.fromkeys(requests, 2)).items()}
    assert sizes == {requests[0]: 0, requests[1]: 2}
    requests[1].output += [2, 11]
    assert model.propose({requests[1]: 2}) == {requests[1]: ()}
    assert not any(model.can_read(request) for request in requests)


def test_a_token_without_an_embedding_ends_the_drafts_of_a_request() -> None:
    """The draft model's slot is free again for the second request."""
    draft = QueuedExecutable(max_num_seqs=1, page_size=4, num_pages=64)
    draft.vocab_size = 19
    policy, limits = SchedulerConfig(speculative=CONFIG), {"max_drafts": 4}
    loop = EngineLoop(QueuedExecutable(**limits), policy=policy, draft_model=DraftModel(draft))
    sampling = SamplingParams(max_tokens=30)
    requests = [RequestState(number, (1, token), sampling) for number, token in ((0, 20), (1, 8))]
    loop.generate(requests)
    assert [request.output for request in requests] == [answer(request) for request in requests]
    assert not requests[0].num_draft_tokens and requests[1].num_draft_tokens
    speculator, ends = loop.scheduler.speculator, max(requests[1].output) >= draft.vocab_size
    assert speculator.counts.without_drafts == {"vocabulary": 1 + ends}
    facts = speculator.facts()
    assert facts is not None and "vocabulary" in facts["without_drafts"]


def test_a_paged_draft_model_follows_the_requests_in_small_steps() -> None:
    limits: dict[str, Any] = {"page_size": 4, "num_pages": 64, "max_step_tokens": 3}
    model = DraftModel(QueuedExecutable(runs_ahead=True, max_prompts=1, **limits))
    request = RequestState(0, (1, 2, 0, 1, 2, 0, 1), SamplingParams(seed=3, max_tokens=9))
    true = answer(RequestState(0, request.prompt, SamplingParams(max_tokens=9)))
    request.output = true[:1]
    assert model.propose({request: 3}) == {request: tuple(true[1:4])}
    request.output = true[:5]
    assert model.propose({request: 2}) == {request: tuple(true[5:7])}
