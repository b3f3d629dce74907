"""What a request answers depends on itself alone: not on the batch, the order or the chunks."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tiny import compiled, precision_of, random_tokens, tiny_model
from tilewright.compiler.sampling.params import SamplingParams
from tilewright.compiler.targets.interface.base import Executable
from tilewright.runtime.loop import EngineLoop
from tilewright.runtime.request import LENGTH, STOPPED
from tilewright.runtime.scheduling.request_state import RequestState, SchedulerConfig

BATCH, CONTEXT, COUNT = 6, 64, 14
MODEL = tiny_model(std=0.3)


@pytest.fixture(scope="module", params=["cpu", pytest.param("reference", marks=pytest.mark.slow)])
def executable(request: pytest.FixtureRequest) -> Iterator[Executable]:
    made = compiled(
        MODEL,
        request.param,
        precision=precision_of("bfp8"),
        max_batch=BATCH,
        max_context=CONTEXT,
    )
    yield made
    made.close()


def jobs() -> list[tuple[tuple[int, ...], SamplingParams]]:
    """Greedy ones, sampled ones, some with end tokens; prompts of 1 to 40 tokens."""
    made = []
    for index in range(COUNT):
        prompt = tuple(random_tokens(1 + 3 * index, seed=index))
        ends = tuple(random_tokens(4, seed=50 + index)) if index % 3 == 0 else ()
        params = SamplingParams(
            temperature=(0.0, 0.8, 1.5)[index % 3],
            top_k=(0, 20)[index % 2],
            top_p=(1.0, 0.9)[index % 4 // 2],
            seed=1000 + index,
            max_tokens=2 + index,
            stop_token_ids=ends,
        )
        made.append((prompt, params))
    return made


def answers(
    executable: Executable, order: Sequence[int], *, chunk: int = 512, arrivals: int = COUNT
) -> dict[int, tuple[list[int], str | None]]:
    """Outputs by job; ``arrivals`` jobs come at once, one more with every step."""
    requests = {index: RequestState(index, *jobs()[index]) for index in order}
    llm = EngineLoop(executable, policy=SchedulerConfig(step_tokens=chunk, reuses=False))
    coming = list(requests.values())
    for request in coming[:arrivals]:
        llm.add(request)
    del coming[:arrivals]
    while coming or llm.has_work():
        if coming:
            llm.add(coming.pop(0))
        llm.step()
    assert executable.memory().state == executable.state_bytes(0, 0)
    return {index: (request.output, request.finish_reason) for index, request in requests.items()}


@pytest.fixture(scope="module")
def alone(executable: Executable) -> dict[int, tuple[list[int], str | None]]:
    """Every job on its own."""
    return {i: found for index in range(COUNT) for i, found in answers(executable, [index]).items()}


def test_the_jobs_are_worth_comparing(alone: dict[int, tuple[list[int], str | None]]) -> None:
    texts = [tuple(output) for output, _ in alone.values()]
    assert len(set(texts)) == COUNT
    assert {reason for _, reason in alone.values()} == {STOPPED, LENGTH}
    assert max(len(set(output)) for output in texts) > 5


@settings(max_examples=12)
@given(
    order=st.permutations(range(COUNT)),
    arrivals=st.integers(1, COUNT),
    chunk=st.integers(1, 50),
    count=st.integers(1, COUNT),
)
def test_answers_do_not_depend_on_the_batch(
    executable: Executable,
    alone: dict[int, tuple[list[int], str | None]],
    order: list[int],
    arrivals: int,
    chunk: int,
    count: int,
) -> None:
    found = answers(executable, order[:count], chunk=chunk, arrivals=arrivals)
    assert found == {index: alone[index] for index in order[:count]}


def test_seeds_matter_and_repeat(executable: Executable) -> None:
    def sampled(seed: int) -> list[int]:
        params = SamplingParams(temperature=1.5, seed=seed, max_tokens=12)
        request = RequestState(0, (1, 2, 3), params)
        EngineLoop(executable).generate([request])
        return request.output

    assert sampled(1) == sampled(1)
    assert len({tuple(sampled(seed)) for seed in range(6)}) > 3


def test_an_end_token_is_the_last_of_the_output(
    executable: Executable, alone: dict[int, tuple[list[int], str | None]]
) -> None:
    prompt, params = jobs()[13]
    output, reason = alone[13]
    assert reason == LENGTH and len(output) == params.max_tokens
    end = output[5]
    stopped = RequestState(0, prompt, replace(params, stop_token_ids=(99, end)))
    EngineLoop(executable).generate([stopped])
    assert stopped.output == output[: output.index(end) + 1]
    assert stopped.finish_reason == STOPPED


def test_tokens_are_heard_in_order_at_rising_times(executable: Executable) -> None:
    requests = [RequestState(index, *job) for index, job in enumerate(jobs())]
    random.Random(3).shuffle(requests)
    heard: dict[int, list[int]] = {request.request_id: [] for request in requests}
    EngineLoop(executable, policy=SchedulerConfig(step_tokens=9)).generate(
        requests, lambda request, token: heard[request.request_id].append(token)
    )
    for request in requests:
        assert heard[request.request_id] == request.output
        assert len(request.token_times) == len(request.output)
        times = [request.arrived_at, *request.token_times]
        assert all(earlier < later for earlier, later in pairwise(times))


def test_a_request_cancelled_while_it_is_heard_ends_there(executable: Executable) -> None:
    llm = EngineLoop(executable)
    params = SamplingParams(max_tokens=20)
    first, second = (RequestState(index, (1, 2), params) for index in range(2))

    def on_token(request: RequestState, token: int) -> None:
        if request is first and len(request.output) == 3:
            llm.cancel(request)

    llm.generate([first, second], on_token)
    assert (len(first.output), first.finish_reason) == (3, "cancelled")
    assert (len(second.output), second.finish_reason) == (20, LENGTH)


def test_a_context_can_be_used_to_its_end(executable: Executable) -> None:
    """The last token is not fed back, so one more than the context fits together."""
    request = RequestState(0, tuple(random_tokens(CONTEXT - 3)), SamplingParams(max_tokens=4))
    EngineLoop(executable).generate([request])
    assert len(request.output) == 4
