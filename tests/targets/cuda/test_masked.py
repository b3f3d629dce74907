"""Steps whose choice waits for masks: of one pass, which is chosen from again, and of several."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from tests.masks import allowed_of
from tests.targets.cuda.test_executable import release
from tests.targets.cuda.test_ragged import PROMPTS, check_alike, made
from tests.tiny import take_seat
from tilewright.compiler.sampling.choose import Row, choose_tokens
from tilewright.compiler.sampling.params import SamplingParams
from tilewright.compiler.targets.cuda.kernels.sampling.mask_logits import forbid
from tilewright.compiler.targets.interface.base import Executable
from tilewright.compiler.targets.interface.step import Chunk, Part, Seat, Step
from tilewright.compiler.targets.interface.token_masks import Allowed

BY_DEVICE = [
    SamplingParams(),
    SamplingParams(temperature=1.0, seed=3),
    SamplingParams(temperature=1.4, top_p=0.8, top_k=9, seed=11),
    SamplingParams(stop_token_ids=(5,)),
]
BY_HOST = [*BY_DEVICE[:3], SamplingParams(frequency_penalty=0.5)]


def steps_of(a: Seat, b: Seat, c: Seat, d: Seat) -> list[dict[str, Any]]:
    """Prompts together, rows alone, rows beside one piece and beside an end, beside two, alone."""
    whole = [Chunk(seat, 0, prompt, chooses=True) for seat, prompt in zip((a, b), PROMPTS)]  # noqa: B905
    first = Chunk(c, 0, PROMPTS[2][:4])
    last = Chunk(c, 4, PROMPTS[2][4:], chooses=True)
    other = Chunk(d, 0, PROMPTS[3], chooses=True)
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
    told: Sequence[Mapping[Seat, int]] | None,
) -> tuple[list[dict[Seat, int]], list[torch.Tensor], list[bool]]:
    """What was chosen in each step, the logits, and which steps were mixed. Masked, and beside the
    definition, or with the tokens of another run ``told``.
    """
    rng = np.random.default_rng(17)
    seats = tuple(take_seat(executable, 24, row) for row in rows)
    by_seat = dict(zip(seats, rows, strict=True))
    lengths, outputs = dict.fromkeys(seats, 0), {seat: list[int]() for seat in seats}
    found: list[dict[Seat, int]] = []
    logits, mixed = [], []
    for number, given in enumerate(steps_of(*seats)):
        decode = given.get("decode", ())
        forced = {} if told is None else {seat: outputs[seat][-1] for seat in decode}
        is_masked = told is None and number != 5  # one chooses at once what was chosen late before
        output = executable.step(Step(**given, forced=forced, masked=is_masked, want_logits=True))
        for seat in decode:
            lengths[seat] += 1
        for chunk in given.get("prompts", ()):
            lengths[chunk.seat] = chunk.end
        masks = {
            seat: rng.random(executable.vocab_size) < 0.2 for seat in seats if rng.random() < 0.6
        }
        if is_masked:
            executable.choose(output, allowed_of(masks))
        now: dict[Seat, int] = {}
        for part in output.parts:
            now |= zip(part.seats, part.read().tokens, strict=True)
            assert part.logits is not None
            logits.append(part.logits())
            if told is None:
                own = masks if is_masked else {}
                check_part(executable, part, by_seat, lengths, outputs, own)
        found.append(now)
        for seat, token in (now if told is None else told[number]).items():
            outputs[seat].append(token)
        mixed.append(output.is_mixed)
    release(executable, seats)
    return found, logits, mixed


def check_part(
    executable: Executable,
    part: Part,
    by_seat: Mapping[Seat, SamplingParams],
    lengths: Mapping[Seat, int],
    outputs: Mapping[Seat, Sequence[int]],
    masks: Mapping[Seat, np.ndarray],
) -> None:
    assert part.logits is not None
    rows = []
    for seat in part.seats:
        counts = {token: list(outputs[seat]).count(token) for token in outputs[seat]}
        rows.append(Row(by_seat[seat], lengths[seat], counts=counts))
    width = executable.num_choosable
    allowed = [m[:width] if (m := masks.get(seat)) is not None else None for seat in part.seats]
    expected, _ = choose_tokens(part.logits()[:, :width], rows, allowed)
    assert list(part.read().tokens) == expected


@pytest.mark.parametrize("rows", [BY_DEVICE, BY_HOST], ids=["by the device", "by the host"])
@pytest.mark.parametrize("rides", [False, True], ids=["apart", "riding"])
def test_masked_steps_choose_as_the_definition_does(
    rides: bool, rows: list[SamplingParams], monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the logits that the same steps have without masks, whatever passes follow in a step."""
    executable = made("llama", monkeypatch, rides)
    executable.num_tokens = executable.vocab_size - 2
    found, logits, mixed = run(executable, rows, None)
    _, plain, _ = run(executable, rows, found)
    for ours, theirs in zip(logits, plain, strict=True):
        check_alike(ours, theirs)
    ends = rides and rows is BY_DEVICE  # who is chosen for by the host comes with the last prompt
    assert mixed == [False, False, False, rides, ends, False, False]


def test_a_masked_step_leaves_no_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever is there stays in its rows, so that the next step sends nothing of them."""
    executable: Any = made("llama", monkeypatch)
    seats = tuple(take_seat(executable, 12) for _ in range(2))
    chunks = [Chunk(seat, 0, PROMPTS[0], chooses=True) for seat in seats]
    for chunk in chunks:
        executable.step(Step(prompts=(chunk,)))
    seated = []
    for _ in range(3):
        output = executable.step(Step(decode=seats, masked=True))
        executable.choose(output, Allowed())
        seated.append(executable._seated)
    assert seated[0] is not None and seated[0] is seated[1] is seated[2]


@pytest.mark.parametrize("width", [1, 31, 32, 33, 64, 95, 4097])
def test_bits_forbid_what_they_say(width: int, device: torch.device) -> None:
    """In the rows that have a mask and up to the width; the rest is not touched."""
    rng = np.random.default_rng(width)
    logits = torch.from_numpy(rng.normal(size=(4, width + 3)).astype(np.float32))
    masks = {Seat(row): rng.random(width) < 0.5 for row in (3, 1)}
    allowed = allowed_of(masks)
    given = logits.clone().to(device)
    words = torch.from_numpy(allowed.words.view(np.int32)).to(device)
    forbid(given, torch.tensor(allowed.seats, device=device), words, width=width)
    for row, mask in masks.items():
        logits[row, :width][torch.from_numpy(~mask)] = float("-inf")
        flags = allowed.flags(row, width)
        assert flags is not None and np.array_equal(flags, mask)
    assert torch.equal(given.cpu(), logits) and allowed.flags(Seat(0), width) is None
