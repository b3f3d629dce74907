"""Random requests with drafts on host executables: outputs equal those of the plain run.

Requests differ in sampling, stops, log probabilities and cached prefixes. Requests are cancelled,
and steps fail, so requests are computed again. Operations depend on the seed only, not on times.

The reference promises no bits. Float32 rounding depends on batches and chunks, and decides near
ties. The tests use float64. Then only a wrong state changes a float32 logit.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from tests.draft_layers import attach, tiny_layer
from tests.models.test_qwen3_5 import ON_CUDA
from tests.runtime.test_speculative import ScriptedDrafts
from tests.tiny import compiled, tiny_model
from tilewright.compiler.sampling.params import SamplingParams
from tilewright.compiler.targets.host.batch import Batch
from tilewright.compiler.targets.interface.base import Executable
from tilewright.compiler.targets.interface.step import Step, StepOutput
from tilewright.compiler.targets.reference import ReferenceExecutable
from tilewright.runtime.loop import EngineLoop
from tilewright.runtime.request import CANCELLED
from tilewright.runtime.scheduling.request_state import RequestState, SchedulerConfig
from tilewright.runtime.speculative.config import DRAFT_MODEL, MTP, NGRAM, SpeculativeConfig
from tilewright.runtime.speculative.draft_model import DraftModel

KINDS = [
    *("reference", "reference hybrid"),
    *("cpu-native", "cpu-native hybrid", "cpu-native window"),
]
CHANGES: dict[str, dict[str, Any]] = {
    "hybrid": {"model_type": "qwen3_5", **ON_CUDA},
    "window": {"model_type": "gemma3_text", "windows": (8, 0)},
}
NUM_TOKENS, CONTEXT = 60, 64


class _StepError(RuntimeError):
    """A planned failure."""


@pytest.fixture(scope="module", params=KINDS)
def executable(request: pytest.FixtureRequest) -> Iterator[Executable]:
    """An executable. A hybrid has a random draft layer."""
    target, _, kind = request.param.partition(" ")
    model = tiny_model(std=0.3, **CHANGES.get(kind, {}))
    made: Any = compiled(model, target, num_threads=1)
    if isinstance(made, ReferenceExecutable):
        use_float64(made)
    if kind == "hybrid":
        attach(made, model, tiny_layer(model), target)
    yield made
    made.close()


def use_float64(executable: Any) -> None:
    """Compute a reference's logits in float64, and round them to float32."""
    for _, state in executable._states:
        state.data = state.double()  # `_values` has the same tensor
    executable._values = {name: each.double() for name, each in executable._values.items()}
    forward = executable.forward

    def precise(batch: Batch) -> np.ndarray:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Tensor, "float", Tensor.double)
            logits: np.ndarray = forward(batch)
        assert logits.dtype == np.float64
        if executable.keeps_hidden:
            executable.last_hidden = executable.last_hidden.astype(np.float32)
        return logits.astype(np.float32)

    executable.forward = precise


@pytest.fixture(scope="module")
def draft_model() -> Iterator[DraftModel]:
    """The plain attention model, with two slots."""
    made = DraftModel(compiled(tiny_model(std=0.3), "cpu-native", max_batch=2, num_threads=1))
    yield made
    made.close()


def random_request(number: int, rng: random.Random, before: Sequence[int] = ()) -> RequestState:
    """``before``: First tokens in the prompt."""
    chance, size = rng.random, rng.randint(1, 25 - min(len(before), 20))
    vocabulary = range(3 if number % 2 else NUM_TOKENS)
    prompt = (*before, *rng.choices(vocabulary, k=size))
    num_tokens = min(rng.randint(1, 30), CONTEXT - len(prompt))
    sampling = SamplingParams(
        temperature=rng.choice((0.0, 0.0, 0.8, 1.3)),
        top_p=rng.choice((1.0, 0.9)),
        seed=number,
        max_tokens=num_tokens,
        min_tokens=rng.randint(0, num_tokens) if chance() < 0.2 else 0,
        stop_token_ids=tuple(rng.sample(range(NUM_TOKENS), 4)) if chance() < 0.6 else (),
        logit_bias=((7, 2.0),) if chance() < 0.1 else (),
        repetition_penalty=1.3 if chance() < 0.1 else 1.0,
        logprobs=rng.randint(0, 2) if chance() < 0.4 else None,
        prompt_logprobs=0 if chance() < 0.1 else None,
    )
    return RequestState(number, prompt, sampling, has_drafts=chance() < 0.9)


def random_loop(executable: Executable, draft_model: DraftModel, rng: random.Random) -> EngineLoop:
    methods = [NGRAM, NGRAM] if executable.capabilities.has_sequence_state else [NGRAM, DRAFT_MODEL]
    methods += [MTP] if executable.capabilities.max_proposals else []
    method, count = rng.choice(methods), rng.randint(1, 8)
    second, third = rng.choices(range(count + 1), k=2)
    config = SpeculativeConfig(
        method=method,
        max_drafts=count,
        max_lookup=2,
        min_lookup=1,
        schedule=((1, 1, count), (2, 2, second), (3, 9, third)),
    )
    policy = SchedulerConfig(
        step_ms=0.0,
        reuses=rng.random() < 0.7,
        step_tokens=rng.choice((None, 4)),
        prompts_first=rng.random() < 0.2,
        speculative=config,
    )
    draft_model.forget()
    return EngineLoop(
        executable, policy=policy, draft_model=draft_model if method == DRAFT_MODEL else None
    )


def failing(step: Callable[[Step], StepOutput], rng: random.Random) -> Callable[[Step], StepOutput]:
    """Return a step function that fails for some steps with rows."""

    def run(given: Step) -> StepOutput:
        if (given.decode or given.prompts) and rng.random() < 0.01:
            raise _StepError
        return step(given)

    return run


def random_requests(
    executable: Executable, rng: random.Random
) -> tuple[list[RequestState], list[RequestState]]:
    """Return requests, and the same requests after a plain run.

    Half of them continue earlier ones. The last one may be another choice for the first prompt.
    """
    made, twins = list[RequestState](), list[RequestState]()
    for number in range(8):
        before: Sequence[int] = ()
        if number >= 4:
            earlier = rng.choice(twins)
            whole = (*earlier.prompt, *earlier.output)
            before = whole[: rng.randint(1, min(len(whole), 50))]
        made.append(random_request(number, rng, before))
        twins += plain_run(executable, made[-1:])
        if rng.random() < 0.6:
            rate = rng.choice((0.0, 0.3, 1.0))
            made[-1].ngrams = ScriptedDrafts(twins[-1].output, rng, rate)
    if rng.random() < 0.5:
        first = made[0]
        made.append(RequestState(8, first.prompt, replace(first.sampling, seed=8), like=first))
        twins += plain_run(executable, made[-1:])
    return made, twins


def plain_run(executable: Executable, requests: Sequence[RequestState]) -> list[RequestState]:
    """Return the same requests after a run without drafts and without shared prefixes."""
    twins = [RequestState(99, request.prompt, request.sampling) for request in requests]
    EngineLoop(executable, policy=SchedulerConfig(reuses=False)).generate(twins)
    return twins


def run_operations(
    executable: Executable, draft_model: DraftModel, count: int, seed: int
) -> tuple[int, int]:
    """Return the accepted draft token count and the failed step count."""
    rng, num_accepted, num_failed = random.Random(seed), 0, 0
    step = executable.step
    while count > 0:
        made, twins = random_requests(executable, rng)
        loop, waiting = random_loop(executable, draft_model, rng), [*made]
        executable.step = failing(step, rng)  # type: ignore[assignment, method-assign]
        while waiting or loop.has_work():
            count -= 1
            if waiting and rng.random() < 0.15:
                loop.add(waiting.pop(0))
            elif loop.scheduler.running and rng.random() < 0.01:
                loop.cancel(rng.choice(loop.scheduler.running))
            else:
                try:
                    loop.step()
                except _StepError:
                    num_failed += 1
        del executable.step
        limit = 1e-5 if isinstance(executable, ReferenceExecutable) else 1e-4
        if executable.capabilities.invariant == "rows" and not loop.scheduler.policy.reuses:
            limit = 0.0
        for request, twin in zip(made, twins, strict=True):
            check(request, twin, limit)
        num_accepted += sum(loop.scheduler.speculator.counts.num_accepted)
    return num_accepted, num_failed


def check(request: RequestState, twin: RequestState, limit: float) -> None:
    """Compare a request with its plain run. Log probabilities differ by ``limit`` at most."""
    size, scores = len(request.output), [each.chosen for each in request.logprobs]
    assert request.output == twin.output[:size]
    if request.finish_reason != CANCELLED:
        assert (size, request.finish_reason) == (len(twin.output), twin.finish_reason)
    wanted = [each.chosen for each in twin.logprobs[:size]]
    assert len(request.token_times) == size
    assert scores == pytest.approx(wanted, rel=0.0, abs=limit)


def test_drafts_change_no_output_in_random_operations(
    executable: Executable, draft_model: DraftModel
) -> None:
    is_slow = getattr(executable, "verifies_in_turn", False)
    num_accepted, _ = run_operations(executable, draft_model, 150 if is_slow else 1_000, seed=2)
    assert num_accepted


@pytest.mark.slow
def test_drafts_change_no_output_in_many_operations(
    executable: Executable, draft_model: DraftModel
) -> None:
    num_accepted, num_failed = run_operations(executable, draft_model, 20_000, seed=6)
    assert num_accepted and num_failed
