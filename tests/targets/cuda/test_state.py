"""What slots hold on the device: tables of pages, state of their own, snapshots, host copies."""

from __future__ import annotations

import pytest
import torch

from tilewright.compiler.ir.state import PER_SEQUENCE, PER_TOKEN, StateSpec
from tilewright.compiler.targets.cuda.state import tables as state_module
from tilewright.compiler.targets.cuda.state.tables import PagedState, sequence_bytes
from tilewright.compiler.targets.interface.base import CompileOptions
from tilewright.compiler.targets.interface.step import AssignPages, Slot, StateSnapshot, SwapHandle

A, B, C = Slot(0), Slot(1), Slot(2)
KV = StateSpec("kv", PER_TOKEN, (2, 1, 16), "bf16")
BLOCKS = StateSpec("blocks", PER_TOKEN, (2, 1, 16), "bfp8")
OWN = (
    StateSpec("window", PER_SEQUENCE, (6, 3), "fp32"),
    StateSpec("memory", PER_SEQUENCE, (2, 4, 5), "fp32"),
)
PAGE_BYTES = 2 * 64 * 16 * 2


def make(own: tuple[StateSpec, ...] = OWN, kv: tuple[StateSpec, ...] = (KV,)) -> PagedState:
    options = CompileOptions(max_batch=3, max_context=100)
    return PagedState(kv, options, torch.device("cpu"), num_pages=6, sequence_specs=own)


def deal(state: PagedState, *edits: AssignPages) -> None:
    for edit in edits:
        state.note(edit)
    state.deal(edits)


def scribble(state: PagedState) -> None:
    """Other values everywhere, none of them twice in a pool."""
    for each in state.sequences.values():
        each.normal_()
    for pages in state.pages.values():
        pages.values.copy_(torch.randint(-100, 100, pages.values.shape))
        if pages.exponents is not None:
            pages.exponents.copy_(torch.randint(0, 255, pages.exponents.shape))


def test_bytes() -> None:
    own = 4 * (6 * 3 + 2 * 4 * 5)
    state = make()
    assert sequence_bytes(OWN) == own == sum(each[0].nbytes for each in state.sequences.values())
    assert state.num_bytes(65) == 2 * PAGE_BYTES + own
    assert state.num_used_bytes() == 0
    deal(state, AssignPages(A, 0, (5,)), AssignPages(B, 0, (0, 1)))
    assert state.num_used_bytes() == 3 * PAGE_BYTES + 2 * own
    deal(state, AssignPages(C, 0, (0, 2)))  # a page that is shared
    assert state.num_used_bytes() == 4 * PAGE_BYTES + 3 * own
    state.save(A, StateSnapshot(3), 10)
    state.save(B, StateSnapshot(3), 12)
    assert state.num_used_bytes() == 4 * PAGE_BYTES + 4 * own
    state.clear(A)
    state.clear(C)
    assert state.num_used_bytes() == 2 * PAGE_BYTES + 2 * own
    state.reset()
    assert state.num_used_bytes() == 0
    assert make(()).num_bytes(65) == 2 * PAGE_BYTES


def test_tables_are_what_was_dealt_last() -> None:
    """Two edits of one place in one go count in their order."""
    state = make()
    deal(
        state,
        AssignPages(B, 0, (4,)),
        AssignPages(A, 0, (1, 2)),
        AssignPages(B, 1, (3,)),
        AssignPages(A, 0, (2, 5)),
    )
    assert state.tables.tolist() == [[2, 5], [4, 3], [0, 0]]
    deal(state, AssignPages(A, 1, (0,)))
    assert state.tables.tolist() == [[2, 0], [4, 3], [0, 0]]
    deal(state)
    deal(state, AssignPages(C, 0, ()))
    deal(state, AssignPages(C, 0, ()), AssignPages(A, 2, ()))
    assert state.tables.tolist() == [[2, 0], [4, 3], [0, 0]]


def test_the_pages_of_one_edit_are_copied_into_their_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing else is done for them: a prompt waits for each thing that is queued before it."""
    state = make()
    monkeypatch.delattr(state_module, "send")
    deal(state, AssignPages(B, 0, (4, 5)))
    deal(state, AssignPages(C, 0, (3,)))
    deal(state, AssignPages(B, 1, (1,)))
    assert state.tables.tolist() == [[0, 0], [4, 1], [3, 0]]


@pytest.mark.parametrize(("first", "ids"), [(1, (0,)), (0, (0, 1, 2))])
def test_a_gap_and_too_many_pages_are_our_own_mistakes(first: int, ids: tuple[int, ...]) -> None:
    with pytest.raises(AssertionError, match="slot 2 has"):
        make().note(AssignPages(C, first, ids))


def test_a_copy_has_all_of_it_and_goes_its_own_way() -> None:
    state = make(kv=(KV, BLOCKS))
    deal(state, AssignPages(A, 0, (3, 1)), AssignPages(B, 0, (3, 5)))
    scribble(state)
    before = [pool.clone() for pool in state._pools()]
    state.copy(A, B, 70)
    for pool, old in zip(state._pools(), before, strict=True):
        assert torch.equal(pool[5], old[1]) and torch.equal(pool[:5], old[:5])
    for each in state.sequences.values():
        assert torch.equal(each[B], each[A])
        each[B] += 1
        assert not torch.equal(each[B], each[A])


def test_whole_pages_are_not_copied() -> None:
    state = make()
    deal(state, AssignPages(A, 0, (3,)), AssignPages(B, 0, (3,)))
    scribble(state)
    before = state.pages["kv"].values.clone()
    state.copy(A, B, 64)
    assert torch.equal(state.pages["kv"].values, before)


def test_a_snapshot_is_what_was_there_then() -> None:
    state = make()
    scribble(state)
    before = {name: each[A].clone() for name, each in state.sequences.items()}
    state.save(A, StateSnapshot(0), 7)
    scribble(state)
    state.save(B, StateSnapshot(1), 9)
    assert (state.load(C, StateSnapshot(0)), state.load(B, StateSnapshot(0))) == (7, 7)
    for name, each in state.sequences.items():
        assert torch.equal(each[C], before[name]) and torch.equal(each[B], before[name])


def test_what_went_to_the_host_comes_back_into_other_pages() -> None:
    """Of the positions there are, and no more: the rest of the slot's pages stay as they are."""
    state = make(kv=(KV, BLOCKS))
    deal(state, AssignPages(A, 0, (4, 2)))
    scribble(state)
    pools = [pool[4].clone() for pool in state._pools()]
    own = [each[A].clone() for each in state.sequences.values()]
    state.put_out(A, SwapHandle(1), 64)
    state.clear(A)
    deal(state, AssignPages(C, 0, (0, 3)))
    scribble(state)
    others = [pool[3].clone() for pool in state._pools()]
    state.take_back(SwapHandle(1), C, 64)
    for pool, kept, other in zip(state._pools(), pools, others, strict=True):
        assert torch.equal(pool[0], kept) and torch.equal(pool[3], other)
    for each, kept in zip(state.sequences.values(), own, strict=True):
        assert torch.equal(each[C], kept)
    with pytest.raises(KeyError):
        state.take_back(SwapHandle(1), C, 64)
