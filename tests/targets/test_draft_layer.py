"""Draft layers on host executables: drafts as in plain torch, and outputs without a change."""

from __future__ import annotations

import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.draft_layers import attach, plain_drafts, tiny_layer
from tests.models.test_qwen3_5 import ON_CUDA
from tests.tiny import compiled, random_tokens, tiny_model
from tilewright.compiler.sampling.params import SamplingParams
from tilewright.compiler.targets.host.batch import Batch
from tilewright.compiler.targets.host.executable import HostExecutable
from tilewright.compiler.targets.interface.step import OpenSlot, PrefillChunk, Slot, Step
from tilewright.runtime.loop import EngineLoop
from tilewright.runtime.request import CANCELLED
from tilewright.runtime.scheduling.request_state import RequestState, SchedulerConfig
from tilewright.runtime.speculative.config import MTP, SpeculativeConfig

TARGETS = ["reference", "cpu-native"]
MODEL = tiny_model(std=0.3, model_type="qwen3_5", **ON_CUDA)
LAYER = tiny_layer(MODEL)


@pytest.fixture(scope="module", params=TARGETS)
def executable(request: pytest.FixtureRequest) -> Iterator[HostExecutable]:
    made: Any = compiled(MODEL, request.param, num_threads=2)
    attach(made, MODEL, LAYER, request.param)
    yield made
    made.close()


def final_states(tokens: list[int], model: SimpleNamespace = MODEL) -> torch.Tensor:
    """Return the reference's final hidden states."""
    reference: Any = compiled(model, "reference", max_context=64)
    reference.step(Step(edits=(OpenSlot(Slot(0), SamplingParams()),)))
    count = len(tokens)
    every, ends = np.arange(count), np.array([0, count])
    batch = Batch(np.array(tokens), every, ends, every, (Slot(0),), False)
    return torch.from_numpy(reference.hidden(batch))


@pytest.mark.parametrize("sizes", [(9,), (1, 5, 3), (2, 7)])
def test_drafts_equal_plain_torch_after_chunks_and_steps(
    executable: HostExecutable, sizes: tuple[int, ...]
) -> None:
    """The second drafts follow a step with an accepted and a rejected draft."""
    executable.reset()
    prompt, slot, start = random_tokens(9, seed=5), Slot(1), 0
    executable.step(Step(edits=(OpenSlot(slot, SamplingParams(), tuple(prompt)),)))
    tokens = list(prompt)
    for size in sizes:
        chunk = PrefillChunk(slot, start, tuple(prompt[start : start + size]), start + size == 9)
        output, start = executable.step(Step(prompts=(chunk,))), start + size
    tokens += output.parts[0].read().tokens
    for _ in range(3):
        drafts = executable.step(Step(proposes={slot: 4})).parts[0].read().tokens
        expected, logits = plain_drafts(LAYER, tokens, final_states(tokens[:-1]), 4)
        margin = logits.topk(2).values
        assert drafts == expected, f"margin {margin}"
        true = executable.step(Step(decode=(slot,))).parts[0].read().tokens
        tokens += true


def test_a_draft_ends_at_logits_that_are_not_numbers(executable: HostExecutable) -> None:
    executable.reset()
    slot, layer = Slot(0), executable.draft_layer
    assert layer is not None
    executable.step(Step(edits=(OpenSlot(slot, SamplingParams()),)))
    executable.step(Step(prompts=(PrefillChunk(slot, 0, (1, 2, 3), chooses=True),)))
    layer._slots[slot].last[:] = np.nan
    chosen = executable.step(Step(proposes={slot: 3})).parts[0].read()
    assert chosen.tokens == [] and chosen.counts == [0]
    assert executable.step(Step(decode=(slot,))).parts[0].read().why == [0]


def run_operations(executable: HostExecutable, count: int, seed: int) -> int:
    """Run random requests with drafts, against the same loop without. Return accepted drafts."""
    rng, num_accepted = random.Random(seed), 0
    while count > 0:
        made = [random_request(number, rng) for number in range(6)]
        plain = EngineLoop(executable)
        twins = [RequestState(99, r.prompt, r.sampling) for r in made]
        plain.generate(twins)
        config = SpeculativeConfig(method=MTP, max_drafts=5, schedule=((1, 9, rng.randint(1, 5)),))
        loop = EngineLoop(executable, policy=SchedulerConfig(speculative=config))
        waiting = [*made]
        while waiting or loop.has_work():
            kind, count = rng.random(), count - 1
            if kind < 0.3 and waiting:
                loop.add(waiting.pop())
            elif kind < 0.32 and loop.scheduler.running:
                loop.cancel(rng.choice(loop.scheduler.running))
            else:
                loop.step()
        for request, twin in zip(made, twins, strict=True):
            output = twin.output[: len(request.output)]
            assert request.output == output
            assert request.finish_reason == CANCELLED or len(output) == len(twin.output)
        num_accepted += sum(loop.scheduler.speculator.counts.num_accepted)
    return num_accepted


def random_request(number: int, rng: random.Random) -> RequestState:
    prompt = tuple(rng.choices(range(3 if number % 2 else 60), k=rng.randint(1, 25)))
    params = SamplingParams(
        temperature=rng.choice((0.0, 0.0, 0.8)), seed=number, max_tokens=rng.randint(1, 30)
    )
    return RequestState(number, prompt, params)


def test_a_wrong_layer_changes_no_output(executable: HostExecutable) -> None:
    """The weights of the layer are random. The reference verifies drafts in turn."""
    count = 200 if executable.verifies_in_turn else 1_800
    assert run_operations(executable, count, seed=3)


@pytest.mark.slow
def test_a_wrong_layer_changes_no_output_in_many_operations(executable: HostExecutable) -> None:
    run_operations(executable, 50_000, seed=4)
