"""One list of steps on every target that keeps its slots on the host: what a step promises."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tests.masks import allowed_of
from tests.models.test_qwen3_5 import ON_CUDA
from tests.tiny import compiled, joined, precision_of, prefill, random_tokens, tiny_model
from tilewright.compiler.sampling.params import SamplingParams
from tilewright.compiler.sampling.sampler import SamplingRow, choose_tokens
from tilewright.compiler.targets.interface.base import Executable
from tilewright.compiler.targets.interface.step import (
    NOT_A_NUMBER,
    AssignPages,
    CloseSlot,
    CopyState,
    LoadState,
    OpenSlot,
    PrefillChunk,
    SaveState,
    Slot,
    StateSnapshot,
    Step,
)

A, B, C = Slot(0), Slot(1), Slot(2)
PROMPT = tuple(random_tokens(9))
HYBRID: dict[str, Any] = {"model_type": "qwen3_5", **ON_CUDA}
PENALISED = SamplingParams(
    temperature=0.8, seed=3, repetition_penalty=1.7, presence_penalty=0.5, logit_bias=((4, 3.0),)
)


@pytest.fixture(scope="module", params=["reference", "cpu", "cpu-native", "n150", "cuda"])
def executable(request: pytest.FixtureRequest) -> Iterator[Executable]:
    table = {"embedding": "bf16"} if request.param == "n150" else {}
    made = compiled(
        tiny_model(std=0.3, num_layers=1),
        request.param,
        precision=precision_of("bfp8", "hifi4", **table),
        compute="fast" if request.param == "n150" else "exact",
    )
    yield made
    made.close()


@pytest.fixture(autouse=True)
def _anew(executable: Executable) -> None:
    executable.reset()


def opened(executable: Executable, slot: Slot, choosing: SamplingParams, *, first: int = 0) -> Step:
    """A slot with a page, where there are pages, each slot its own."""
    edits: list[OpenSlot | AssignPages] = [OpenSlot(slot, choosing, PROMPT)]
    if executable.capabilities.page_size:
        edits.append(AssignPages(slot, 0, (slot + first,)))
    return Step(edits=tuple(edits))


def test_a_prompt_s_token_is_read_next_without_the_host(executable: Executable) -> None:
    executable.step(opened(executable, A, SamplingParams()))
    first = executable.step(Step(prompts=(PrefillChunk(A, 0, PROMPT, chooses=True),)))
    second = executable.step(Step(decode=(A,), want_logits=True))
    (token,) = first.parts[0].read().tokens
    alone = prefill_of(executable, [*PROMPT, token])
    torch.testing.assert_close(joined(second), alone[-1:], atol=0.25, rtol=0)
    assert second.parts[0].read().tokens == [int(joined(second)[0].argmax())]


def prefill_of(executable: Executable, tokens: list[int]) -> torch.Tensor:
    executable.reset()
    executable.step(opened(executable, C, SamplingParams(), first=1))
    chunk = PrefillChunk(C, 0, tuple(tokens), echoes=True)
    return joined(executable.step(Step(prompts=(chunk,), want_logits=True)))


def test_decode_comes_before_prompts_and_each_slot_is_answered(executable: Executable) -> None:
    for slot in (A, B):
        executable.step(opened(executable, slot, SamplingParams()))
    executable.step(Step(prompts=(PrefillChunk(A, 0, PROMPT, chooses=True),)))
    output = executable.step(Step(decode=(A,), prompts=(PrefillChunk(B, 0, PROMPT, chooses=True),)))
    assert [part.slots for part in output.parts] == [(A,), (B,)]
    middle = executable.step(Step(decode=(B, A)))
    assert middle.parts[0].slots == (B, A) and len(middle.parts[0].read().tokens) == 2


def test_a_forced_token_is_read_in_the_place_of_the_one_held(executable: Executable) -> None:
    executable.step(opened(executable, A, SamplingParams()))
    executable.step(Step(prompts=(PrefillChunk(A, 0, PROMPT, chooses=True),)))
    forced = executable.step(Step(decode=(A,), forced={A: 7}, want_logits=True))
    got = joined(forced).clone()
    torch.testing.assert_close(got, prefill_of(executable, [*PROMPT, 7])[-1:], atol=0.25, rtol=0)


@pytest.mark.parametrize(
    "choosing",
    [
        PENALISED,
        SamplingParams(temperature=1.2, min_p=0.2, seed=5),
        SamplingParams(temperature=3.0, top_n_sigma=1.5, seed=5),
    ],
)
def test_tokens_are_those_of_the_definition(
    executable: Executable, choosing: SamplingParams
) -> None:
    executable.step(opened(executable, A, choosing))
    output = executable.step(
        Step(prompts=(PrefillChunk(A, 0, PROMPT, chooses=True),), want_logits=True)
    )
    counts: dict[int, int] = {}
    for position in range(len(PROMPT), len(PROMPT) + 8):
        (token,) = output.parts[0].read().tokens
        row = SamplingRow(choosing, position, PROMPT, dict(counts))
        assert choose_tokens(joined(output), [row]) == ([token], [True])
        counts[token] = counts.get(token, 0) + 1
        output = executable.step(Step(decode=(A,), want_logits=True))


def test_masks_come_late_and_end_tokens_wait_for_their_time(executable: Executable) -> None:
    executable.step(opened(executable, A, SamplingParams(min_tokens=2, stop_token_ids=(5,))))
    allowed = np.zeros(executable.vocab_size, dtype=bool)
    allowed[[5, 6]] = True
    output = executable.step(Step(prompts=(PrefillChunk(A, 0, PROMPT, chooses=True),), masked=True))
    executable.choose(output, allowed_of({A: allowed}))
    assert output.parts[0].read().tokens == [6], "an end token may not come first"
    for tokens, why in (([6], [0]), ([5], [1])):
        allowed[6] = tokens == [6]
        output = executable.step(Step(decode=(A,), masked=True))
        executable.choose(output, allowed_of({A: allowed}))
        assert (output.parts[0].read().tokens, output.parts[0].read().why) == (tokens, why)


def test_an_empty_mask_is_no_number(executable: Executable) -> None:
    executable.step(opened(executable, A, SamplingParams()))
    output = executable.step(Step(prompts=(PrefillChunk(A, 0, PROMPT, chooses=True),), masked=True))
    executable.choose(output, allowed_of({A: np.zeros(executable.vocab_size, dtype=bool)}))
    assert output.parts[0].read().why == [NOT_A_NUMBER]


def test_a_reset_forgets_a_choice_that_waits_and_all_slots(executable: Executable) -> None:
    for _ in range(2):
        executable.step(opened(executable, A, SamplingParams()))
        output = executable.step(
            Step(prompts=(PrefillChunk(A, 0, PROMPT, chooses=True),), masked=True)
        )
        assert output.parts[0].slots == (A,)
        executable.reset()


def test_log_probabilities_are_those_of_the_raw_logits(executable: Executable) -> None:
    executable.step(opened(executable, A, PENALISED))
    chunk = PrefillChunk(A, 0, PROMPT, chooses=True, echoes=True)
    output = executable.step(Step(prompts=(chunk,), logprobs=3, want_logits=True))
    (part,) = output.parts
    chosen, expected = part.read(), joined(output).double().log_softmax(-1)
    assert chosen.logprobs is not None and chosen.echo is not None
    assert chosen.logprobs[0].chosen == pytest.approx(float(expected[-1, chosen.tokens[0]]))
    best = expected[-1].topk(3)
    assert [token for token, _ in chosen.logprobs[0].top] == best.indices.tolist()
    assert [value for _, value in chosen.logprobs[0].top] == pytest.approx(best.values.tolist())
    wanted = [float(expected[at, token]) for at, token in enumerate(PROMPT[1:])]
    assert [each.chosen for each in chosen.echo] == pytest.approx(wanted)


def test_a_copy_goes_its_own_way(executable: Executable) -> None:
    for slot in (A, B):
        executable.step(opened(executable, slot, SamplingParams()))
    executable.step(Step(prompts=(PrefillChunk(A, 0, PROMPT),)))
    executable.step(Step(edits=(CopyState(A, B, len(PROMPT)),)))
    rows = [PrefillChunk(slot, len(PROMPT), (4, 2), chooses=True) for slot in (A, B)]
    found = [executable.step(Step(prompts=(row,), want_logits=True)) for row in rows]
    assert torch.equal(*map(joined, found))


@pytest.mark.parametrize("kind", ["greedy", "sampled", "penalised"])
def test_the_choices_of_a_prompt_compute_it_once(executable: Executable, kind: str) -> None:
    """Each has its own seed, and goes on as one that has computed the prompt itself."""
    is_interpreted = executable.capabilities.page_size and not torch.cuda.is_available()
    if kind != "penalised" and is_interpreted:
        pytest.skip("one kind will do in the interpreter")
    makes = {
        "greedy": SamplingParams(),
        "sampled": SamplingParams(temperature=1.5),
        "penalised": PENALISED,
    }
    rows = [replace(makes[kind], seed=seed) for seed in (5, 6, 7)]
    for slot, row in zip((A, B, C), rows, strict=True):
        executable.step(opened(executable, slot, row))
    executable.step(Step(prompts=(PrefillChunk(A, 0, PROMPT[:4]),)))
    chunk = PrefillChunk(A, 4, PROMPT[4:], chooses=True, also=(B, C))
    first = executable.step(Step(prompts=(chunk,)))
    (part,) = first.parts
    tokens = [list(part.read().tokens)]
    assert part.slots == (A, B, C)
    for _ in range(3):
        tokens.append(list(executable.step(Step(decode=(A, B, C))).parts[0].read().tokens))
    for at, row in enumerate(rows):
        executable.reset()
        executable.step(opened(executable, A, row))
        executable.step(Step(prompts=(PrefillChunk(A, 0, PROMPT[:4]),)))
        last = executable.step(Step(prompts=(PrefillChunk(A, 4, PROMPT[4:], chooses=True),)))
        alone = [last.parts[0].read().tokens[0]]
        for _ in range(3):
            alone += executable.step(Step(decode=(A,))).parts[0].read().tokens
        assert [each[at] for each in tokens] == alone


def test_a_slot_opened_again_has_no_past(executable: Executable) -> None:
    executable.step(opened(executable, A, PENALISED))
    executable.step(Step(prompts=(PrefillChunk(A, 0, PROMPT, chooses=True),)))
    again = (CloseSlot(A), *opened(executable, A, SamplingParams()).edits)
    chunk = PrefillChunk(A, 0, PROMPT[:4], chooses=True)
    output = executable.step(Step(edits=again, prompts=(chunk,), want_logits=True))
    got = joined(output).clone()
    alone = prefill_of(executable, list(PROMPT[:4]))[-1:]
    torch.testing.assert_close(got, alone, atol=0.25, rtol=0)


@pytest.mark.parametrize("target", ["reference", "cpu"])
def test_a_snapshot_on_the_way_continues_as_the_whole(target: str) -> None:
    hybrid = compiled(tiny_model(std=0.2, **HYBRID), target)
    whole = prefill(hybrid, list(PROMPT))
    hybrid.reset()
    hybrid.step(Step(edits=(OpenSlot(A, SamplingParams()), OpenSlot(B, SamplingParams()))))
    hybrid.step(Step(prompts=(PrefillChunk(A, 0, PROMPT, saves=((5, StateSnapshot(2)),)),)))
    hybrid.step(Step(edits=(CopyState(A, B, 9), LoadState(B, StateSnapshot(2)))))
    rest = PrefillChunk(B, 5, PROMPT[5:], chooses=True)
    output = hybrid.step(Step(prompts=(rest,), want_logits=True))
    torch.testing.assert_close(joined(output), whole[-1:], atol=1e-4, rtol=0)
    hybrid.step(Step(edits=(SaveState(B, StateSnapshot(2)),)))
    hybrid.close()
