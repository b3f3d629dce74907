"""Whatever requests come, and whatever an executable can do: all are served, in turn, and fairly.

The null target checks that the positions of every sequence follow on what its state holds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.runtime.queued import QueuedExecutable
from tests.tiny import compiled, tiny_model
from tilewright.compiler.errors import RequestError
from tilewright.compiler.runtime.llm import LLM
from tilewright.compiler.runtime.request import CANCELLED, LENGTH, STOPPED, Request, SamplingParams
from tilewright.compiler.targets.base import Executable, StateHandle, StepInput, StepOutput
from tilewright.compiler.targets.null import NullExecutable

CONTEXT = 64
MODEL = tiny_model(num_layers=1, vocab_size=1061)
"""A prompt is ids of its own, from 100 times its number on; the null target answers 0."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """Requests as (prompt length, tokens to generate, step before which it comes)."""

    work: tuple[tuple[int, int, int], ...]
    max_batch: int
    mixed: bool
    max_prefills: int
    chunk: int

    def requests(self) -> list[Request]:
        return [
            Request(
                index,
                tuple(range(100 * index + 1, 100 * index + 1 + prompt)),
                SamplingParams(max_tokens=wanted),
            )
            for index, (prompt, wanted, _) in enumerate(self.work)
        ]

    def num_chunks(self, prompt: int) -> int:
        return -(-prompt // self.chunk)


@st.composite
def scenarios(draw: st.DrawFn) -> Scenario:
    max_batch = draw(st.integers(1, 5))
    one = st.tuples(st.integers(1, 40), st.integers(1, 8), st.integers(0, 25))
    return Scenario(
        work=tuple(draw(st.lists(one, min_size=1, max_size=10))),
        max_batch=max_batch,
        mixed=draw(st.booleans()),
        max_prefills=draw(st.integers(1, max_batch)),
        chunk=draw(st.integers(1, 48)),
    )


@dataclass
class Recorded:
    """What the steps of a scenario were, and which requests got a token at each."""

    steps: list[StepInput] = field(default_factory=list)
    running: list[int] = field(default_factory=list)
    tokens: list[list[int]] = field(default_factory=list)


def null(scenario: Scenario) -> Executable:
    executable = compiled(MODEL, "null", max_batch=scenario.max_batch, max_context=CONTEXT)
    assert isinstance(executable, NullExecutable)
    executable.capabilities = replace(
        executable.capabilities,
        mixed_steps=scenario.mixed,
        max_prefill_sequences=scenario.max_prefills,
    )
    return executable


def run(scenario: Scenario, requests: list[Request]) -> Recorded:
    executable, recorded = null(scenario), Recorded()
    original = executable.step

    def step(inputs: StepInput) -> StepOutput:
        recorded.steps.append(inputs)
        recorded.running.append(executable.capabilities.max_batch - executable.num_free())
        return original(inputs)

    executable.step = step
    llm = LLM(executable, prefill_chunk=scenario.chunk)
    coming = sorted(range(len(requests)), key=lambda i: (scenario.work[i][2], i))
    at = 0
    while coming or llm.scheduler.has_work():
        while coming and (scenario.work[coming[0]][2] <= at or not llm.scheduler.has_work()):
            llm.add(requests[coming.pop(0)])
        recorded.tokens.append([request.request_id for request in llm.step()])
        at += 1
        assert at < 10_000, "no end"
    assert executable.num_free() == scenario.max_batch, "all of the state is given back"
    return recorded


def lengths(inputs: StepInput) -> list[int]:
    return inputs.cu_seqlens.diff().tolist()


@given(scenarios())
def test_every_request_finishes_with_all_its_tokens(scenario: Scenario) -> None:
    requests = scenario.requests()
    recorded = run(scenario, requests)
    for request, (_, wanted, _) in zip(requests, scenario.work, strict=True):
        assert len(request.output) == wanted
        assert request.finish_reason == LENGTH
        assert request.state is None
    chunks = sum(scenario.num_chunks(prompt) for prompt, _, _ in scenario.work)
    decodes = sum(wanted - 1 for _, wanted, _ in scenario.work)
    assert len(recorded.steps) <= chunks + decodes, "every step does some of the work"


@given(scenarios())
def test_steps_respect_the_capabilities(scenario: Scenario) -> None:
    recorded = run(scenario, scenario.requests())
    assert max(recorded.running) <= scenario.max_batch
    for inputs in recorded.steps:
        assert 1 <= inputs.num_sequences <= scenario.max_batch
        assert len(set(inputs.states)) == inputs.num_sequences
        parts = lengths(inputs)
        assert max(parts) <= scenario.chunk
        prefills = sum(int(inputs.tokens[start]) != 0 for start in inputs.cu_seqlens[:-1])
        assert prefills <= scenario.max_prefills
        if not scenario.mixed:
            assert prefills in (0, len(parts)), "phases were mixed"


@given(scenarios())
def test_chunks_cover_each_prompt_once_and_in_order(scenario: Scenario) -> None:
    requests = scenario.requests()
    seen: dict[int, list[int]] = {}
    rows = 0
    for inputs in run(scenario, requests).steps:
        rows += len(inputs.logit_rows)
        for start, end in pairwise(inputs.cu_seqlens.tolist()):
            tokens = inputs.tokens[start:end].tolist()
            if tokens[0] == 0:
                assert tokens == [0]
                continue
            known = seen.setdefault(tokens[0] // 100, [])
            assert inputs.positions[start] == len(known)
            known += tokens
    assert seen == {index: list(request.prompt) for index, request in enumerate(requests)}
    assert rows == sum(wanted for _, wanted, _ in scenario.work), "logits only where one samples"


@given(scenarios())
def test_requests_start_in_the_order_they_came(scenario: Scenario) -> None:
    requests = scenario.requests()
    started: list[int] = []
    for inputs in run(scenario, requests).steps:
        firsts = inputs.tokens[inputs.cu_seqlens[:-1]].tolist()
        started += [token // 100 for token in firsts if token % 100 == 1]
    arrived = sorted(requests, key=lambda request: request.arrived_at)
    assert started == [request.request_id for request in arrived]


@given(scenarios())
def test_no_request_starves(scenario: Scenario) -> None:
    """Between two of its tokens lie at most the chunks of those that can have come meanwhile."""
    recorded = run(scenario, scenario.requests())
    prompts = [prompt for prompt, _, _ in scenario.work]
    for index, (_, wanted, _) in enumerate(scenario.work):
        others = prompts[:index] + prompts[index + 1 :]
        waits = sum(map(scenario.num_chunks, others)) if not scenario.mixed else 0
        got = [at for at, ids in enumerate(recorded.tokens) if index in ids]
        assert all(later - earlier <= waits + 1 for earlier, later in pairwise(got))
        assert len(got) == wanted


@given(scenarios(), st.data())
def test_cancelled_requests_stop_and_the_others_do_not(
    scenario: Scenario, data: st.DataObject
) -> None:
    requests = scenario.requests()
    cancelled = data.draw(st.sets(st.integers(0, len(requests) - 1)))
    after = data.draw(st.integers(0, 10))
    executable = null(scenario)
    llm = LLM(executable, prefill_chunk=scenario.chunk)
    for request in requests:
        llm.add(request)
    for _ in range(after):
        if llm.scheduler.has_work():
            llm.step()
    for index in cancelled:
        done = requests[index].finish_reason
        llm.cancel(requests[index])
        llm.cancel(requests[index])
        assert requests[index].finish_reason == (done or CANCELLED)
        assert requests[index].state is None
    while llm.scheduler.has_work():
        assert all(request.finish_reason != CANCELLED for request in llm.step())
    for index, request in enumerate(requests):
        if index not in cancelled:
            assert len(request.output) == request.sampling.max_tokens
            assert request.finish_reason == LENGTH
    assert executable.num_free() == scenario.max_batch


def one(*, chunk: int = 8, max_batch: int = 2, mixed: bool = True) -> LLM:
    scenario = Scenario((), max_batch, mixed, max_batch, chunk)
    return LLM(null(scenario), prefill_chunk=chunk)


def test_an_end_token_ends_a_request_and_is_its_last() -> None:
    request = Request(0, (1, 2, 3), SamplingParams(max_tokens=9, end_tokens=(5, 0)))
    one().generate([request])
    assert request.output == [0]
    assert request.finish_reason == STOPPED


def test_an_end_token_on_the_last_place_is_a_stop() -> None:
    request = Request(0, (1,), SamplingParams(max_tokens=1, end_tokens=(0,)))
    one().generate([request])
    assert request.finish_reason == STOPPED


@pytest.mark.parametrize(
    ("prompt", "wanted", "message"),
    [
        ((), 1, "the prompt is empty; allowed: at least one token"),
        ((1,) * 65, 1, "a prompt of 65 tokens and 1 to generate .*; allowed: 65 together"),
        ((1,) * 60, 6, "a prompt of 60 tokens and 6 to generate .*; allowed: 65 together"),
        ((1, 1061), 1, "token 1061; allowed: 0 to 1060"),
        ((-1,), 1, "token -1; allowed: 0 to 1060"),
    ],
)
def test_what_can_never_be_served_is_refused_and_the_rest_goes_on(
    prompt: tuple[int, ...], wanted: int, message: str
) -> None:
    llm = one()
    good = Request(0, (1,) * 60, SamplingParams(max_tokens=5))
    llm.add(good)
    with pytest.raises(RequestError, match=message) as caught:
        llm.add(Request(1, prompt, SamplingParams(max_tokens=wanted)))
    assert "\n" not in str(caught.value)
    llm.generate([])
    assert len(good.output) == 5
    assert llm.executable.num_free() == 2


def test_state_held_elsewhere_is_an_error_and_no_endless_loop() -> None:
    llm = one(max_batch=1)
    handle = llm.executable.reserve(4)
    llm.add(Request(0, (1,), SamplingParams(max_tokens=3)))
    with pytest.raises(RequestError, match="all of the state is held elsewhere"):
        llm.step()
    llm.executable.free(handle)
    llm.generate([])
    assert not llm.scheduler.has_work()


def test_prompts_go_before_decoding_where_phases_are_apart() -> None:
    llm = one(mixed=False, chunk=2)
    first = Request(0, (1, 2), SamplingParams(max_tokens=3))
    llm.add(first)
    llm.step()
    second = Request(1, (1, 2, 3, 4), SamplingParams(max_tokens=3))
    llm.add(second)
    assert [llm.step() for _ in range(3)] == [[], [second], [first, second]]


def batch_of(*lengths: int) -> list[Request]:
    return [
        Request(n, (1,) * length, SamplingParams(max_tokens=5)) for n, length in enumerate(lengths)
    ]


def test_generate_queues_all_or_nothing() -> None:
    llm, heard = one(), list[int]()
    with pytest.raises(RequestError, match=r"a prompt of 65 tokens and 5 to generate"):
        llm.generate(batch_of(3, 4, 65))
    assert not llm.scheduler.has_work()
    llm.generate(
        [Request(9, (1,), SamplingParams(max_tokens=2))], lambda r, t: heard.append(r.request_id)
    )
    assert heard == [9, 9]


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_a_callback_that_raises_leaves_nothing_behind(runs_ahead: bool) -> None:
    executable = QueuedExecutable(runs_ahead=runs_ahead, max_batch=2)
    llm = LLM(executable)
    requests = batch_of(3, 4, 5)

    def on_token(request: Request, token: int) -> None:
        if len(request.output) == 2:
            raise KeyError("a bug of the listener")

    with pytest.raises(KeyError):
        llm.generate(requests, on_token)
    assert not llm.scheduler.has_work()
    assert executable.num_free() == 2
    assert {request.finish_reason for request in requests} == {CANCELLED}
    (again,) = batch_of(3)
    llm.generate([again])
    assert len(again.output) == 5


def test_an_executable_that_raises_leaves_nothing_behind() -> None:
    llm = one()
    llm.executable.step = broken = Broken(llm.executable.step)
    with pytest.raises(RuntimeError, match="step 3"):
        llm.generate(batch_of(3, 4, 5))
    assert not llm.scheduler.has_work()
    assert llm.executable.num_free() == 2
    assert broken.num_steps == 3


@dataclass
class Broken:
    """The third step fails."""

    step: Callable[[StepInput], StepOutput]
    num_steps: int = 0

    def __call__(self, inputs: StepInput) -> StepOutput:
        self.num_steps += 1
        if self.num_steps == 3:
            raise RuntimeError("step 3")
        return self.step(inputs)


def test_an_idle_step_is_no_error() -> None:
    llm = one()
    assert llm.step() == []
    llm.generate(batch_of(3))
    assert llm.step() == []


def test_a_request_that_cannot_be_given_state_still_waits() -> None:
    llm = one()
    reserve, refuse = llm.executable.reserve, True

    def reserve_later(num_positions: int) -> StateHandle:
        if refuse:
            raise RequestError("no pages left")
        return reserve(num_positions)

    llm.executable.reserve = reserve_later
    first, second = batch_of(3, 4)
    llm.add(first)
    llm.add(second)
    with pytest.raises(RequestError, match="no pages left"):
        llm.step()
    refuse = False
    llm.generate([])
    assert [len(first.output), len(second.output)] == [5, 5]
