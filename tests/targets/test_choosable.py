"""Ids that no token has: models have logits for them, and nobody chooses them."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from tests.masks import allowed_of
from tests.tiny import compiled, joined, precision_of, tiny_model
from tilewright.compiler.sampling.params import SamplingParams
from tilewright.compiler.sampling.sampler import SamplingRow, choose_tokens
from tilewright.compiler.targets.cuda.outputs.deferred_sampling import DeviceChoice, choice_of
from tilewright.compiler.targets.cuda.outputs.pinned_ring import PinnedRing
from tilewright.compiler.targets.cuda.outputs.sampling_batch import drawing_of
from tilewright.compiler.targets.cuda.state.slot_table import SlotTable
from tilewright.compiler.targets.interface.step import (
    NOT_A_NUMBER,
    AssignPages,
    OpenSlot,
    PrefillChunk,
    Slot,
    Step,
)

SLOT = Slot(0)
GREEDY, DRAWN = SamplingParams(), SamplingParams(temperature=9.0, seed=1)


@pytest.mark.parametrize("target", ["reference", "cuda"])
def test_ids_without_a_token_are_never_chosen(target: str) -> None:
    made = compiled(
        tiny_model(std=0.3), target, precision=precision_of("bfp8", "hifi4"), compute="exact"
    )
    made.num_tokens = 3
    mask = np.arange(made.vocab_size) > 1
    for choosing, is_masked in ((GREEDY, False), (DRAWN, False), (DRAWN, True)):
        made.reset()
        pages = (AssignPages(SLOT, 0, (0,)),) if made.capabilities.page_size else ()
        chunk = PrefillChunk(SLOT, 0, (1, 5, 9), chooses=True)
        step = Step(edits=(OpenSlot(SLOT, choosing), *pages), prompts=(chunk,), masked=is_masked)
        for _ in range(2):
            output = made.step(step)
            if is_masked:
                made.choose(output, allowed_of({SLOT: mask}))
            (token,) = output.parts[0].read().tokens
            assert token == 2 if is_masked else token < 3
            step = Step(decode=(SLOT,), masked=is_masked, want_logits=True)
        assert joined(output).shape == (1, made.vocab_size), "their logits are there all the same"
    made.close()


@pytest.mark.parametrize("choosing", [GREEDY, SamplingParams(temperature=1.5, top_p=0.9, seed=4)])
def test_masks_on_the_device_choose_as_the_definition_does(choosing: SamplingParams) -> None:
    """Bits are sent for those who have a mask, and the neighbour's row stays as it is."""
    rng = np.random.default_rng(5)
    logits = torch.from_numpy(rng.normal(0, 3, (3, 45)).astype(np.float32))
    table = SlotTable(4, 2, torch.device("cpu"))
    slots = (Slot(2), Slot(0), Slot(3))
    table.open({slot: replace(choosing, stop_token_ids=(7,)) for slot in slots})
    masks = {slot: rng.random(45) < 0.2 for slot in (Slot(1), *slots[:2])}
    choice, given = choice_of(table, slots, (9, 10, 11), 43), logits.clone()
    again = partial(choice.apply, given, drawing_of([choosing]))
    late = DeviceChoice(slots, given, choice, again, PinnedRing(4, torch.device("cpu")), {})
    late.choose(allowed_of(masks))
    rows = [SamplingRow(choosing, position) for position in (9, 10, 11)]
    allowed = [masks[slot][:43] if slot in masks else None for slot in slots]
    assert list(late.read().tokens) == choose_tokens(logits[:, :43], rows, allowed)[0]
    assert torch.equal(given[2], logits[2]) and torch.equal(given[:, 43:], logits[:, 43:])
    late.choose(allowed_of({slots[0]: np.zeros(45, dtype=bool)}))
    assert late.read().why[0] == NOT_A_NUMBER
