"""Drafts in the runtime: equal outputs, the choice of their length, and their options."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from tests.runtime.queued import VOCAB, QueuedExecutable
from tests.runtime.test_scheduler import answer
from tilewright.compiler.sampling.params import SamplingParams
from tilewright.errors import ConfigError
from tilewright.runtime.loop import EngineLoop
from tilewright.runtime.request import CANCELLED
from tilewright.runtime.scheduling.request_state import RequestState, SchedulerConfig
from tilewright.runtime.scheduling.step_cost_model import StepCostModel
from tilewright.runtime.speculative.config import SpeculativeConfig, read_speculative_config
from tilewright.runtime.speculative.draft_length import DraftLength
from tilewright.runtime.speculative.ngram import NgramIndex


class ScriptedDrafts(NgramIndex):
    """The true next tokens, each wrong with a probability."""

    def __init__(self, true: Sequence[int], rng: random.Random, rate: float) -> None:
        super().__init__((), longest=1, shortest=1)
        self._true, self._rng, self._rate, self._at = true, rng, rate, 0

    def update(self, output: Sequence[int]) -> bool:
        self._at = len(output)
        return True

    def propose(self, count: int) -> tuple[int, ...]:
        rng, size = self._rng, self._rng.randint(0, count)
        true = self._true[self._at : self._at + size]
        return tuple(t if rng.random() >= self._rate else rng.randrange(VOCAB) for t in true)

    def may_match_next(self) -> bool:
        return self._rng.random() < 0.7


def random_loop(rng: random.Random) -> EngineLoop:
    limits: dict[str, Any] = {"max_prompts": 2, "max_drafts": rng.randint(1, 8)}
    if rng.random() < 0.7:
        limits |= {"page_size": 4, "num_pages": rng.randint(16, 24)}
    if rng.random() < 0.3:
        limits |= {"has_sequence_state": True, "num_snapshots": 3}
    executable = QueuedExecutable(runs_ahead=rng.random() < 0.6, **limits)
    policy = SchedulerConfig(
        step_ms=0.0,
        cache_replies=rng.random() < 0.5,
        host_bytes=rng.choice((0, 1000)),
        speculative=SpeculativeConfig(max_drafts=rng.randint(1, 8), schedule=((1, 9, 8),)),
    )
    return EngineLoop(executable, policy=policy)


def random_request(number: int, rng: random.Random) -> tuple[RequestState, list[int]]:
    """Return a request and the output that it must have."""
    prompt = tuple(rng.choices(range(3), k=rng.randint(1, 20)))
    sampling = SamplingParams(seed=number % 7, max_tokens=rng.randint(1, 40))
    true = answer(RequestState(0, prompt, sampling))
    ends = tuple(rng.choices(range(VOCAB), k=2)) if rng.random() < 0.4 else ()
    at = next((i for i, token in enumerate(true) if token in ends), len(true))
    made = RequestState(
        number,
        prompt,
        SamplingParams(seed=number % 7, max_tokens=len(true), stop_token_ids=ends),
        priority=rng.choice((0, 0, 1)),
    )
    made.ngrams = ScriptedDrafts(true, rng, rng.choice((0.0, 0.3, 1.0)))
    return made, true[: at + 1]


def run_operations(count: int, seed: int) -> tuple[int, int]:
    """Return the numbers of preemptions and accepted draft tokens."""
    rng, num_preemptions, num_accepted = random.Random(seed), 0, 0
    while count > 0:
        loop, live = random_loop(rng), list[tuple[RequestState, list[int]]]()
        for number in range(200):
            kind = rng.random()
            if kind < 0.15 and len(live) < 12:
                live.append(random_request(number, rng))
                loop.add(live[-1][0])
            elif kind < 0.17 and live:
                loop.cancel(rng.choice(live)[0])
            else:
                loop.step()
            live = [each for each in live if is_right(*each)]
        while loop.has_work():
            loop.step()
        assert not [each for each in live if is_right(*each)]
        num_preemptions += loop.scheduler.num_preemptions
        num_accepted += sum(loop.scheduler.speculator.counts.num_accepted)
        count -= 200
    return num_preemptions, num_accepted


def is_right(request: RequestState, expected: list[int]) -> bool:
    """Check the output. Return whether the request runs."""
    assert request.output == expected[: len(request.output)]
    assert len(request.token_times) == len(request.output)
    is_done = request.finish_reason is not None
    assert not is_done or request.finish_reason == CANCELLED or request.output == expected
    return not is_done


def test_drafts_change_no_output_under_random_operations() -> None:
    num_preemptions, num_accepted = run_operations(2_000, seed=1)
    assert num_preemptions > 5 and num_accepted > 500


@pytest.mark.slow
def test_drafts_change_no_output_under_many_operations() -> None:
    run_operations(100_000, seed=2)


def test_a_draft_follows_the_last_of_the_longest_matches() -> None:
    index = NgramIndex((1, 2, 3, 9, 2, 3, 8, 7, 2, 3), longest=3, shortest=2)
    index.update([])
    assert index.propose(3) == (8, 7, 2), "the last match of two tokens"
    index.update([9])
    assert index.propose(2) == (2, 3), "a match of three tokens"
    index.update([9, 5])
    assert index.propose(2) == () and not index.may_match_next()


def test_a_draft_of_a_repeated_text_continues_itself() -> None:
    index = NgramIndex((4, 5, 6, 4, 5, 6, 4), longest=2, shortest=2)
    index.update([5])
    assert index.propose(7) == (6, 4, 5, 6, 4, 5, 6)


def test_a_long_prompt_is_indexed_over_several_steps() -> None:
    prompt = (*range(9000), 0, 1)
    index = NgramIndex(prompt, longest=2, shortest=2)
    assert not index.update([]) and index.propose(1) == (2,)
    assert not index.update([]) and index.update([])


def test_the_length_follows_acceptance_and_cost() -> None:
    free, dear = DraftLength(5, lambda rows: 10.0), DraftLength(5, lambda rows: 10.0 * rows)
    assert free.choose(1, [5]) == 5 and dear.choose(1, [5]) == 0
    mixed = DraftLength(5, lambda rows: 10.0 + rows)
    for _ in range(300):
        mixed.record(5, 1)
    assert mixed.choose(1, [5]) == 1
    for _ in range(300):
        mixed.record(1, 0)
    chosen = [mixed.choose(1, [5]) for _ in range(65 + 129 + 257)]
    probes = [at for at, size in enumerate(chosen) if size]
    assert probes == [64, 193, 450], "each rejected probe doubles the wait"
    mixed.record(1, 1)
    assert [mixed.choose(1, [5]) for _ in range(65)].index(1) == 64, "an accepted one ends it"


def test_a_cost_that_no_acceptance_repays_is_measured_rarely() -> None:
    """Drafts are right, but two rows per request take 3.5 times the time of a row."""
    length = DraftLength(3, lambda rows: 10.0, lambda rows: 35.0 * rows / 128)
    probes = 0
    for _ in range(2048):
        if length.choose(64, [1] * 64):
            probes += 1
            length.record(1, 1)
    assert probes == 1
    assert [length.choose(1, [1]) for _ in range(2)] == [1, 1], "a single request gains"


def test_requests_with_images_have_no_drafts_of_a_model() -> None:
    reasons = {}
    for method in ("ngram", "mtp"):
        executable = QueuedExecutable(max_drafts=4)
        executable.capabilities = replace(executable.capabilities, max_proposals=4)
        config = SpeculativeConfig(method=method, max_drafts=4)
        loop = EngineLoop(executable, policy=SchedulerConfig(speculative=config))
        request = RequestState(0, (1,), SamplingParams(max_tokens=9))
        request.images = (Any,)  # type: ignore[assignment]
        speculator = loop.scheduler.speculator
        speculator.on_arrival(request)
        facts = speculator.facts()
        assert facts is not None and ("images" in facts["without_drafts"]) is (method == "mtp")
        reasons[method] = request.has_drafts, speculator.counts.without_drafts
    assert reasons == {"ngram": (True, {}), "mtp": (False, {"images": 1})}


def test_requests_with_penalties_or_an_opt_out_have_no_drafts() -> None:
    executable = QueuedExecutable(max_drafts=4)
    config = SpeculativeConfig(max_drafts=4, schedule=((1, 9, 4),))
    loop = EngineLoop(executable, policy=SchedulerConfig(speculative=config))
    made = [
        RequestState(0, (1,), SamplingParams(max_tokens=9, presence_penalty=1.0)),
        RequestState(1, (1,), SamplingParams(max_tokens=9), has_drafts=False),
        RequestState(2, (1,), SamplingParams(max_tokens=9)),
    ]
    for request in made:
        request.ngrams = ScriptedDrafts([0] * 9, random.Random(0), 0.0)
    loop.generate(made)
    counts = loop.scheduler.speculator.counts
    assert counts.without_drafts == {"penalties": 1, "opt_out": 1} and counts.num_drafts
    assert [bool(request.num_draft_tokens) for request in made] == [False, False, True]


def test_options_have_the_names_of_vllm() -> None:
    found = read_speculative_config('{"method": "ngram", "prompt_lookup_max": 4}')
    assert found == SpeculativeConfig(max_auto_drafts=10, max_lookup=4, min_lookup=4)
    assert (found.max_drafts, found.limit(1)) == (5, 10), "a GPU reserves rows for 5"
    assert found.num_reserved == 5
    limited = read_speculative_config('{"method": "ngram", "num_speculative_tokens": 5}')
    assert limited.limit(1) == 5
    rows = "[[1, 16, 3], [17, 64, 1], [65, 512, 0]]"
    key = "num_speculative_tokens_per_batch_size"
    found = read_speculative_config(f'{{"method": "ngram", "{key}": {rows}}}')
    assert [found.limit(size) for size in (1, 16, 17, 65, 999)] == [3, 3, 1, 0, 0]
    assert found.num_reserved == 3
    for name in ("mtp", "qwen3_5_mtp", "qwen3_next_mtp"):
        found = read_speculative_config(f'{{"method": "{name}"}}')
        assert (found.method, found.max_drafts) == ("mtp", 3)
    found = read_speculative_config('{"method": "ngram", "disable_by_batch_size": 8}')
    assert [found.limit(size) for size in (7, 8)] == [10, 0], "the default of ngram"
    assert found.num_reserved == 5, "a GPU reserves the default, too"
    for method in ('"ngram"', '"draft_model", "model": "m"'):
        more = '"num_speculative_tokens": 5, "disable_by_batch_size": 8'
        found = read_speculative_config(f'{{"method": {method}, {more}}}')
        assert [found.limit(size) for size in (7, 8)] == [5, 0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"method": ', "allowed: a JSON object"),
        ("[]", "allowed: a JSON object"),
        ('{"method": "ngram", "k": 3}', "unknown key 'k'; allowed: method"),
        ('{"method": "magic"}', "method 'magic'; allowed: ngram"),
        ("{}", "method 'None'; allowed: ngram"),
        ('{"method": "ngram", "num_speculative_tokens": 0}', "integers, 1 to 15"),
        ('{"method": "ngram", "num_speculative_tokens": 16}', "integers, 1 to 15"),
        ('{"method": "ngram", "num_speculative_tokens": true}', "integers, 1 to 15"),
        ('{"method": "ngram", "num_speculative_tokens": NaN}', "integers, 1 to 15"),
        ('{"method": "ngram", "prompt_lookup_max": 2, "prompt_lookup_min": 3}', "min 3; allowed"),
        ('{"method": "ngram", "draft_sample_method": "gumbel"}', "allowed: greedy"),
        ('{"method": "ngram", "disable_by_batch_size": 1}', "integers, 2 to 4096"),
        ('{"method": "ngram", "model": "m"}', "model with method ngram; allowed: method draft_mod"),
        ('{"method": "mtp", "num_speculative_tokens": 16}', "integers, 1 to 15"),
        ('{"method": "mtp", "num_speculative_tokens": 0}', "integers, 1 to 15"),
        ('{"method": "mtp", "model": "m"}', "model with method mtp; allowed: method draft_mod"),
        ('{"method": "draft_model"}', "model 'None'; allowed: a path"),
        (
            '{"method": "draft_model", "model": "m", "prompt_lookup_max": 2}',
            "allowed: method ngram",
        ),
        ('{"method": "draft_model", "model": "m", "draft_tensor_parallel_size": 2}', "1 to 1"),
        ('{"method": "mtp", "draft_precision": "bf16"}', "allowed: method draft_model"),
        (
            '{"method": "draft_model", "model": "m", "draft_precision": 8}',
            "draft_precision '8'; allowed: auto, or a name",
        ),
        (
            '{"method": "draft_model", "model": "m", "draft_precision": "bf61"}',
            "draft_precision: unknown precision 'bf61'; allowed: accuracy",
        ),
    ],
)
def test_wrong_options_are_errors_of_a_line(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_speculative_config(text)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_drafts_stop_if_their_steps_cost_more_than_plain_steps() -> None:
    cost = StepCostModel()
    length = DraftLength(3, cost.decode, partial(cost.decode, has_drafts=True))
    times = {False: 0, True: 0}
    for _ in range(600):
        k = length.choose(32, [3] * 32)
        cost.measure(32 * (1 + k), 0, 20.0 if k else 6.0, has_drafts=k > 0)
        times[k > 0] += 1
        for _ in range(32 * (k > 0)):
            length.record(k, 1)
    assert times[True] < 30, "1.8 tokens for 3.3 times the cost"
