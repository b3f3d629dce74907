"""The next decode step made of the last one: with new tensors, or left to the device."""

from __future__ import annotations

from dataclasses import replace

import torch

from tilewright.compiler.ops import SamplingBatch
from tilewright.compiler.targets.base import StateHandle, StepInput, StepOutput


def decode_step(num_sequences: int = 2) -> StepInput:
    count = torch.arange(num_sequences)
    sampling = SamplingBatch(
        temperature=torch.ones(num_sequences),
        top_k=torch.zeros_like(count),
        top_p=torch.ones(num_sequences),
        seeds=count,
        positions=count + 11,
        end_tokens=torch.full((num_sequences, 1), -1),
    )
    return StepInput(
        tokens=count + 3,
        positions=count + 10,
        cu_seqlens=torch.arange(num_sequences + 1),
        logit_rows=count,
        states=tuple(StateHandle(index) for index in range(num_sequences)),
        sampling=sampling,
    )


def test_what_is_read_is_what_arrives_else_the_tensors() -> None:
    tensors = StepOutput(torch.tensor([4, 5]), torch.tensor([False, True]))
    assert tensors.read() == ([4, 5], [False, True])
    assert replace(tensors, arrived=lambda: ([6], [True])).read() == ([6], [True])


def test_a_step_ahead_has_the_very_tensors_of_its_first() -> None:
    first = decode_step()
    second = first.ahead(one := StepOutput())
    third = second.ahead(two := StepOutput())
    assert (first.previous, first.advanced) == (None, 0)
    assert (second.previous, second.advanced) == (one, 1)
    assert third.previous is two and third.advanced == 2
    for name in ("tokens", "positions", "cu_seqlens", "logit_rows", "states", "sampling"):
        assert getattr(third, name) is getattr(first, name)
    assert third.want_logits is first.want_logits


def test_only_the_very_next_step_continues_one() -> None:
    first = decode_step()
    second = first.ahead(StepOutput())
    third = second.ahead(StepOutput())
    assert second.continues(first) and third.continues(second)
    assert not first.continues(None) and not second.continues(None)
    assert not first.continues(first) and not third.continues(first)
    assert not second.continues(decode_step()), "equal, and not the same"
    assert not first.following(torch.tensor([1, 2])).continues(first)


def test_a_settled_step_is_as_the_following_ones() -> None:
    first = decode_step()
    tokens = torch.tensor([8, 9])
    output = StepOutput(tokens, torch.tensor([False, False]))
    wanted = first.following(torch.tensor([1, 2])).following(tokens)
    found = first.ahead(StepOutput()).ahead(output).settled()
    assert found.previous is None and found.advanced == 0
    assert found.tokens.tolist() == wanted.tokens.tolist() == [8, 9]
    assert found.positions.tolist() == wanted.positions.tolist() == [12, 13]
    assert found.sampling is not None and wanted.sampling is not None
    assert found.sampling.positions.tolist() == wanted.sampling.positions.tolist() == [13, 14]
    assert found.sampling.seeds is first.sampling.seeds  # type: ignore[union-attr]
    assert found.states is first.states
    assert first.settled() is first
