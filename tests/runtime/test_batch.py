"""Steps made of pieces: flat tokens, positions, bounds, rows; groups that an executable allows."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tilewright.compiler.runtime.batch import Piece, build_step, sampling_batch, split_by_capability
from tilewright.compiler.runtime.request import Request, SamplingParams
from tilewright.compiler.targets.base import Capabilities, StateHandle


def capabilities(*, mixed: bool, prefills: int) -> Capabilities:
    return Capabilities(
        max_batch=64, max_context=64, max_prefill_sequences=prefills, mixed_steps=mixed
    )


@st.composite
def piece_lists(draw: st.DrawFn, *, least: int = 0) -> list[Piece]:
    count = draw(st.integers(least, 8))
    return [
        Piece(
            StateHandle(index),
            draw(st.lists(st.integers(0, 60), min_size=1, max_size=6)),
            draw(st.integers(0, 40)),
            draw(st.booleans()),
        )
        for index in draw(st.permutations(range(count)))
    ]


def test_a_step_by_hand() -> None:
    pieces = [
        Piece(StateHandle(4), [7, 8, 9], 0, False),
        Piece(StateHandle(1), [3], 17, True),
        Piece(StateHandle(2), [5, 6], 2, True),
    ]
    inputs = build_step(pieces, want_logits=True)
    assert inputs.tokens.tolist() == [7, 8, 9, 3, 5, 6]
    assert inputs.positions.tolist() == [0, 1, 2, 17, 2, 3]
    assert inputs.cu_seqlens.tolist() == [0, 3, 4, 6]
    assert inputs.logit_rows.tolist() == [3, 5]
    assert inputs.states == (4, 1, 2)
    assert inputs.want_logits and inputs.sampling is None


def test_a_step_without_rows_still_has_index_tensors() -> None:
    inputs = build_step([Piece(StateHandle(0), [1, 2], 0, False)])
    assert inputs.logit_rows.shape == (0,)
    assert inputs.logit_rows.dtype == torch.int64
    assert not inputs.want_logits


@given(piece_lists(least=1))
def test_a_step_holds_every_piece_once(pieces: list[Piece]) -> None:
    inputs = build_step(pieces)
    for tensor in (inputs.tokens, inputs.positions, inputs.cu_seqlens, inputs.logit_rows):
        assert tensor.dtype == torch.int64
    bounds = inputs.cu_seqlens.tolist()
    wanted = inputs.logit_rows.tolist()
    for piece, state, (start, end) in zip(pieces, inputs.states, pairwise(bounds), strict=True):
        assert state == piece.state
        assert inputs.tokens[start:end].tolist() == piece.tokens
        positions = range(piece.position, piece.position + end - start)
        assert inputs.positions[start:end].tolist() == list(positions)
        assert (end - 1 in wanted) == piece.wants_logits
    assert len(wanted) == sum(piece.wants_logits for piece in pieces)
    assert bounds[-1] == len(inputs.tokens)


@given(piece_lists(), st.booleans(), st.integers(1, 4))
def test_groups_respect_the_capabilities(pieces: list[Piece], mixed: bool, prefills: int) -> None:
    groups = split_by_capability(pieces, capabilities(mixed=mixed, prefills=prefills))
    assert sorted(p.state for group in groups for p in group) == sorted(p.state for p in pieces)
    assert all(groups), "a step of nothing is no step"
    if mixed:
        assert len(groups) <= 1
        return
    for group in groups:
        lengths = [len(piece.tokens) for piece in group]
        assert max(lengths) == 1 or min(lengths) > 1, "phases were mixed"
        assert max(lengths) == 1 or len(group) <= prefills
    num_prefills = sum(len(piece.tokens) > 1 for piece in pieces)
    has_decodes = num_prefills < len(pieces)
    assert len(groups) == -(-num_prefills // prefills) + has_decodes, "no more steps than needed"


def test_sampling_rows_are_padded_and_know_their_position() -> None:
    first = Request(0, (1, 2, 3), SamplingParams(temperature=0.5, top_k=4, top_p=0.9, seed=11))
    second = Request(1, (1,), SamplingParams(seed=-(1 << 63), end_tokens=(7, 8)))
    second.output += [4, 5]
    batch = sampling_batch([first, second])
    assert batch.temperature.tolist() == [0.5, 0.0]
    assert batch.top_k.tolist() == [4, 0]
    assert batch.top_p.tolist() == [pytest.approx(0.9), 1.0]
    assert batch.seeds.tolist() == [11, -(1 << 63)]
    assert batch.positions.tolist() == [3, 3]
    assert batch.end_tokens.tolist() == [[-1, -1], [7, 8]]


def test_sampling_without_end_tokens_has_one_column_that_nothing_equals() -> None:
    assert sampling_batch([Request(0, (1,))]).end_tokens.tolist() == [[-1]]
