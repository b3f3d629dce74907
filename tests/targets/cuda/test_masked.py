"""Masked steps with deferred sampling: with a single forward, and with several."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from tests.grids import WHOLE_GRID
from tests.masks import allowed_of
from tests.targets.cuda.test_executable import release
from tests.targets.cuda.test_ragged import PROMPTS, check_alike, made
from tests.tiny import take_slot
from tilewright.compiler.sampling.params import SamplingParams
from tilewright.compiler.sampling.sampler import SamplingRow, choose_tokens
from tilewright.compiler.targets.cuda.kernels.sampling.mask_logits import forbid
from tilewright.compiler.targets.interface.base import Executable
from tilewright.compiler.targets.interface.step import PrefillChunk, SamplerOutput, Slot, Step
from tilewright.compiler.targets.interface.token_masks import TokenMask

BY_DEVICE = [
    SamplingParams(),
    SamplingParams(temperature=1.0, seed=3),
    SamplingParams(temperature=1.4, top_p=0.8, top_k=9, seed=11),
    SamplingParams(stop_token_ids=(5,)),
]
BY_HOST = [*BY_DEVICE[:3], SamplingParams(frequency_penalty=0.5)]


def steps_of(a: Slot, b: Slot, c: Slot, d: Slot) -> list[dict[str, Any]]:
    """Prompts, decode rows, and mixed batches with one and two chunks."""
    whole = [PrefillChunk(slot, 0, prompt, chooses=True) for slot, prompt in zip((a, b), PROMPTS)]  # noqa: B905
    first = PrefillChunk(c, 0, PROMPTS[2][:4])
    last = PrefillChunk(c, 4, PROMPTS[2][4:], chooses=True)
    other = PrefillChunk(d, 0, PROMPTS[3], chooses=True)
    return [
        {"prompts": tuple(whole)},
        {"decode": (a, b)},
        {"decode": (a, b)},
        {"decode": (a, b), "prompts": (first,)},
        {"decode": (a, b), "prompts": (last, other)},
        {"decode": (a, b, c, d)},
        {"decode": (a, b, c, d)},
    ]


def run(
    executable: Executable,
    rows: Sequence[SamplingParams],
    told: Sequence[Mapping[Slot, int]] | None,
) -> tuple[list[dict[Slot, int]], list[torch.Tensor], list[bool]]:
    """Return tokens, logits, and the mixed steps. Masked, or with tokens from another run."""
    rng = np.random.default_rng(17)
    slots = tuple(take_slot(executable, 24, row) for row in rows)
    by_slot = dict(zip(slots, rows, strict=True))
    lengths, outputs = dict.fromkeys(slots, 0), {slot: list[int]() for slot in slots}
    found: list[dict[Slot, int]] = []
    logits, mixed = [], []
    for number, given in enumerate(steps_of(*slots)):
        decode = given.get("decode", ())
        forced = {} if told is None else {slot: outputs[slot][-1] for slot in decode}
        is_masked = told is None and number != 5  # this run samples immediately
        output = executable.step(Step(**given, forced=forced, masked=is_masked, want_logits=True))
        for slot in decode:
            lengths[slot] += 1
        for chunk in given.get("prompts", ()):
            lengths[chunk.slot] = chunk.end
        masks = {
            slot: rng.random(executable.vocab_size) < 0.2 for slot in slots if rng.random() < 0.6
        }
        if is_masked:
            executable.choose(output, allowed_of(masks))
        now: dict[Slot, int] = {}
        for part in output.parts:
            now |= zip(part.slots, part.read().tokens, strict=True)
            assert part.logits is not None
            logits.append(part.logits())
            if told is None:
                own = masks if is_masked else {}
                check_part(executable, part, by_slot, lengths, outputs, own)
        found.append(now)
        for slot, token in (now if told is None else told[number]).items():
            outputs[slot].append(token)
        mixed.append(output.is_mixed)
    release(executable, slots)
    return found, logits, mixed


def check_part(
    executable: Executable,
    part: SamplerOutput,
    by_slot: Mapping[Slot, SamplingParams],
    lengths: Mapping[Slot, int],
    outputs: Mapping[Slot, Sequence[int]],
    masks: Mapping[Slot, np.ndarray],
) -> None:
    assert part.logits is not None
    rows = []
    for slot in part.slots:
        counts = {token: list(outputs[slot]).count(token) for token in outputs[slot]}
        rows.append(SamplingRow(by_slot[slot], lengths[slot], counts=counts))
    width = executable.num_choosable
    allowed = [m[:width] if (m := masks.get(slot)) is not None else None for slot in part.slots]
    expected, _ = choose_tokens(part.logits()[:, :width], rows, allowed)
    assert list(part.read().tokens) == expected


@pytest.mark.parametrize("rows", [BY_DEVICE, BY_HOST], ids=["by the device", "by the host"])
@pytest.mark.parametrize(
    "rides",
    [pytest.param(False, marks=WHOLE_GRID), True],
    ids=["apart", "riding"],
)
def test_masked_steps_choose_as_the_definition_does(
    rides: bool, rows: list[SamplingParams], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The logits equal steps without masks, for any forwards in a step.

    Most steps with riding rows have separate forwards, too.
    """
    executable = made("llama", monkeypatch, rides)
    executable.num_tokens = executable.vocab_size - 2
    found, logits, mixed = run(executable, rows, None)
    _, plain, _ = run(executable, rows, found)
    for ours, theirs in zip(logits, plain, strict=True):
        check_alike(ours, theirs)
    ends = rides and rows is BY_DEVICE  # the last prompt is sampled on the host
    assert mixed == [False, False, False, rides, ends, False, False]


def test_a_masked_step_leaves_no_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its rows keep their slots, so the next step sends nothing."""
    executable: Any = made("llama", monkeypatch)
    slots = tuple(take_slot(executable, 12) for _ in range(2))
    chunks = [PrefillChunk(slot, 0, PROMPTS[0], chooses=True) for slot in slots]
    for chunk in chunks:
        executable.step(Step(prompts=(chunk,)))
    running = []
    for _ in range(3):
        output = executable.step(Step(decode=slots, masked=True))
        executable.choose(output, TokenMask())
        running.append(executable._captured_slots)
    assert running[0] is not None and running[0] is running[1] is running[2]


@pytest.mark.parametrize("width", [1, 31, 32, 33, 64, 95, 4097])
def test_bits_forbid_what_they_say(width: int, device: torch.device) -> None:
    """Only in masked rows, up to the width."""
    rng = np.random.default_rng(width)
    logits = torch.from_numpy(rng.normal(size=(4, width + 3)).astype(np.float32))
    masks = {Slot(row): rng.random(width) < 0.5 for row in (3, 1)}
    allowed = allowed_of(masks)
    given = logits.clone().to(device)
    words = torch.from_numpy(allowed.words.view(np.int32)).to(device)
    forbid(given, torch.tensor(allowed.slots, device=device), words, width=width)
    for row, mask in masks.items():
        logits[row, :width][torch.from_numpy(~mask)] = float("-inf")
        flags = allowed.flags(row, width)
        assert flags is not None and np.array_equal(flags, mask)
    assert torch.equal(given.cpu(), logits) and allowed.flags(Slot(0), width) is None
