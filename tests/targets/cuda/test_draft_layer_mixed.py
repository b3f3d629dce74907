"""The draft layer with fast arithmetic, after joined prompts and mixed batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.draft_layers import plain_drafts
from tests.targets.cuda.sharing import set_sharing
from tests.targets.cuda.test_draft_layer import LAYER, MODEL
from tests.targets.test_draft_layer import final_states
from tests.tiny import compiled, precision_of, random_tokens, take_slot
from tilewright.compiler.driver import lower_draft_layer
from tilewright.compiler.targets.cuda.graphs.buckets import Buckets
from tilewright.compiler.targets.interface.base import CompileOptions
from tilewright.compiler.targets.interface.step import PrefillChunk, Slot, Step

_MARGIN = 0.3
"""Larger than the difference between bfloat16 and float32 logits."""


@pytest.mark.parametrize(
    "is_captured",
    [
        pytest.param(True, id="captured"),
        pytest.param(False, marks=pytest.mark.slow, id="uncaptured"),
        pytest.param(True, marks=pytest.mark.gpu, id="gpu-captured"),
        pytest.param(False, marks=pytest.mark.gpu, id="gpu-uncaptured"),
    ],
)
def test_draft_layer_after_mixed_batches_reads_the_states_of_each_slot(
    is_captured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slot decodes with the prompts of two others. Then each of them has drafts."""
    set_sharing(monkeypatch)
    options = CompileOptions(max_batch=4, max_context=64, compute="fast", max_drafts=2)
    layer = lower_draft_layer(MODEL, LAYER, precision_of("bf16"), target="cuda", options=options)
    how: Any = {"precision": precision_of("bf16"), "max_drafts": 2, "draft_layer": layer}
    executable: Any = compiled(MODEL, "cuda", compute="fast", max_context=64, **how)
    if not is_captured:
        monkeypatch.setattr(Buckets, "batch", lambda *_: None)
    first, *others = (take_slot(executable) for _ in range(3))
    tokens: dict[Slot, list[int]] = {first: random_tokens(9, seed=5)}
    tokens |= {slot: random_tokens(5 + slot, seed=slot) for slot in others}

    def run(step: Step) -> Any:
        output = executable.step(step)
        for sampled in output.parts:
            chosen, start = sampled.read(), 0
            counts = chosen.counts or (1,) * len(chosen.tokens)
            for slot, count in zip(sampled.slots, counts, strict=True):
                tokens[slot] += chosen.tokens[start : start + count]
                start += count
        return output

    run(Step(prompts=(PrefillChunk(first, 0, tuple(tokens[first]), chooses=True),)))
    drafts = executable.step(Step(proposes={first: 2})).parts[0].read().tokens
    run(Step(decode=(first,), drafts={first: tuple(drafts)}))
    chunks = [PrefillChunk(slot, 0, tuple(tokens[slot]), chooses=True) for slot in others]
    assert run(Step(decode=(first,), prompts=tuple(chunks))).is_mixed
    expected = {slot: final_states(line[:-1], MODEL) for slot, line in tokens.items()}
    counts = dict.fromkeys(tokens, 1)
    output = executable.step(Step(proposes=counts)).parts[0]
    final, num_clear = executable._layer._final, 0
    for slot, draft in zip(output.slots, output.read().tokens, strict=True):
        last = final.states[slot, len(tokens[slot]) - 2].float().cpu()
        assert torch.cosine_similarity(last, expected[slot][-1], dim=0) > 0.99
        (token,), logits = plain_drafts(LAYER, tokens[slot], expected[slot], 1)
        best, second = logits.topk(2).values.tolist()
        assert draft == token or best - second < _MARGIN
        num_clear += best - second >= _MARGIN
    assert num_clear >= 2, "near ties show nothing"
    executable.close()
