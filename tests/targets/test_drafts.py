"""Verified drafts: tokens, log probabilities and finish states equal those of plain steps."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest

from tests.models.test_qwen3_5 import ON_CUDA
from tests.tiny import compiled, precision_of, random_tokens, tiny_model
from tilewright.compiler.sampling.params import SamplingParams
from tilewright.compiler.targets.cpu.native.executable import _max_drafts
from tilewright.compiler.targets.interface.base import CompileOptions, Executable
from tilewright.compiler.targets.interface.capabilities import MAX_DRAFTS
from tilewright.compiler.targets.interface.step import (
    OpenSlot,
    PrefillChunk,
    SampledTokens,
    Slot,
    Step,
)
from tilewright.compiler.targets.interface.token_masks import TokenMask, num_words, put_bits
from tilewright.runtime.loop import EngineLoop
from tilewright.runtime.scheduling.request_state import RequestState, SchedulerConfig
from tilewright.runtime.speculative.config import SpeculativeConfig

SLOTS = (Slot(0), Slot(1), Slot(2))
PROMPTS = {slot: tuple(random_tokens(7 + 3 * slot)) for slot in SLOTS}
END = 40
SAMPLINGS = {
    SLOTS[0]: SamplingParams(stop_token_ids=(5, 9)),
    SLOTS[1]: SamplingParams(temperature=1.3, seed=7, top_p=0.9),
    SLOTS[2]: SamplingParams(temperature=0.7, seed=9, repetition_penalty=1.4),
}
Line = list[tuple[int, int, float]]
KINDS = [
    "reference",
    "reference hybrid",
    "cpu-native",
    "cpu-native hybrid",
    "cpu-native window",
    "cpu-native bf16",
]


@pytest.fixture(scope="module", params=KINDS)
def executable(request: pytest.FixtureRequest) -> Iterator[Executable]:
    target, _, kind = request.param.partition(" ")
    changes: dict[str, Any] = {
        "hybrid": {"model_type": "qwen3_5", **ON_CUDA},
        "window": {"model_type": "gemma3_text", "windows": (8, 0)},
    }.get(kind, {})
    compute = "fast" if kind == "bf16" else "exact"
    precision = precision_of("bf16", "hifi4", kv_cache="bfp8") if kind == "bf16" else None
    model = tiny_model(std=0.3, **changes)
    made = compiled(model, target, precision=precision, compute=compute, num_threads=2)
    yield made
    made.close()


def begin(executable: Executable) -> dict[Slot, Line]:
    executable.reset()
    opened = tuple(OpenSlot(slot, SAMPLINGS[slot], PROMPTS[slot]) for slot in SLOTS)
    executable.step(Step(edits=opened))
    lines: dict[Slot, Line] = {}
    for slot in SLOTS:
        chunk = PrefillChunk(slot, 0, PROMPTS[slot], chooses=True)
        chosen = executable.step(Step(prompts=(chunk,), logprobs=0)).parts[0].read()
        lines[slot] = rows_of(chosen)
    return lines


def rows_of(chosen: SampledTokens) -> Line:
    assert chosen.logprobs is not None
    scores = [each.chosen for each in chosen.logprobs]
    return list(zip(chosen.tokens, chosen.why, scores, strict=True))


def plain(executable: Executable) -> dict[Slot, Line]:
    lines = begin(executable)
    while len(lines[SLOTS[0]]) < END - len(PROMPTS[SLOTS[0]]):
        chosen = executable.step(Step(decode=SLOTS, logprobs=0)).parts[0].read()
        for slot, emitted in zip(SLOTS, rows_of(chosen), strict=True):
            lines[slot].append(emitted)
    return lines


def drafts_of(line: Line, at: int, rng: random.Random, rate: float) -> tuple[int, ...]:
    """Return the next tokens of a line, each wrong with probability ``rate``."""
    true = [token for token, _, _ in line[at : at + rng.randint(0, MAX_DRAFTS)]]
    return tuple(token if rng.random() >= rate else rng.randrange(60) for token in true)


@pytest.mark.parametrize("rate", [0.0, 0.3, 1.0])
def test_drafts_change_no_token_and_no_bit(executable: Executable, rate: float) -> None:
    expected, rng = plain(executable), random.Random(f"{rate}")
    lines, num_accepted = begin(executable), 0
    while True:
        decode = tuple(s for s in SLOTS if len(lines[s]) < len(expected[s]) and rng.random() < 0.9)
        if not decode and all(len(lines[s]) >= len(expected[s]) for s in SLOTS):
            break
        drafts: Mapping[Slot, tuple[int, ...]] = {
            slot: found
            for slot in decode
            if (found := drafts_of(expected[slot], len(lines[slot]), rng, rate))
        }
        if not decode:
            continue
        chosen = executable.step(Step(decode=decode, drafts=drafts, logprobs=0)).parts[0].read()
        rows, counts = rows_of(chosen), chosen.counts or [1] * len(decode)
        assert len(counts) == len(decode) and sum(counts) == len(rows)
        for slot, count in zip(decode, counts, strict=True):
            emitted, rows = rows[:count], rows[count:]
            own = drafts.get(slot, ())
            taken = tuple(token for token, _, _ in emitted)
            right = next((i for i in range(len(own)) if own[i] != taken[i : i + 1][0]), len(own))
            assert count == 1 + right, "the longest prefix is accepted, and a token more"
            lines[slot] += emitted
            num_accepted += count - 1
    assert num_accepted or rate == 1.0
    for slot in SLOTS:
        line = lines[slot][: len(expected[slot])]
        assert [entry[:2] for entry in line] == [entry[:2] for entry in expected[slot]]
        scores = [score for _, _, score in line]
        wanted = [score for _, _, score in expected[slot]]
        if executable.capabilities.invariant == "rows":
            assert scores == wanted
        else:
            assert scores == pytest.approx(wanted, abs=1e-4)


def test_slots_with_drafts_do_not_wait_for_masks(executable: Executable) -> None:
    expected, lines = plain(executable), begin(executable)
    decode, drafted = SLOTS[:2], SLOTS[0]
    draft = tuple(token for token, _, _ in expected[drafted][1:4])
    step = Step(decode=decode, drafts={drafted: draft}, masked=True, logprobs=0)
    output = executable.step(step)
    words = np.zeros((1, num_words(executable.vocab_size)), np.uint32)
    put_bits(words[0], (33,), are_set=True)
    emitted = rows_of(output.parts[0].read())
    executable.choose(output, TokenMask(SLOTS[1:2], words))
    assert [part.slots for part in output.parts] == [(drafted,), decode[1:]]
    assert [entry[:2] for entry in emitted] == [entry[:2] for entry in expected[drafted][1:5]]
    assert output.parts[1].read().tokens == [33]
    after = rows_of(executable.step(Step(decode=decode, logprobs=0)).parts[0].read())[0]
    assert after[0] == expected[drafted][len(lines[drafted]) + 4][0]


def outputs_of(executable: Executable, config: SpeculativeConfig | None) -> tuple[list[Any], int]:
    """Return outputs with log probabilities, and the number of accepted draft tokens."""
    loop = EngineLoop(executable, policy=SchedulerConfig(reuses=False, speculative=config))
    requests = []
    for number in range(6):
        prompt = PROMPTS[SLOTS[number % 3]] * 2
        heat = 0.4 * (number % 2)
        params = SamplingParams(max_tokens=20, temperature=heat, seed=number, logprobs=0)
        requests.append(RequestState(number, prompt, params))
    loop.generate(requests)
    scores = [[score.chosen for score in request.logprobs] for request in requests]
    outputs = [request.output for request in requests]
    return [outputs, scores], sum(request.num_accepted_tokens for request in requests)


def test_ngram_drafts_change_no_output(executable: Executable) -> None:
    (expected, wanted), _ = outputs_of(executable, None)
    config = SpeculativeConfig(max_lookup=2, min_lookup=1, schedule=((1, 9, 5),))
    (outputs, scores), num_accepted = outputs_of(executable, config)
    assert outputs == expected and num_accepted > 0
    if executable.capabilities.invariant == "rows":
        assert scores == wanted


@pytest.mark.parametrize(("seqs", "drafts"), [(1, 15), (128, 3), (512, 0), (1024, 0)])
def test_native_drafts_of_hybrids_fit_a_call(seqs: int, drafts: int) -> None:
    assert _max_drafts(CompileOptions(max_batch=seqs), has_state=True) == drafts
