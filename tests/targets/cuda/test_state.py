"""What sequences keep beside their pages: bytes, copies, lengths."""

from __future__ import annotations

import pytest
import torch

from tilewright.compiler.errors import RequestError
from tilewright.compiler.ir.state import PER_SEQUENCE, PER_TOKEN, StateSpec
from tilewright.compiler.targets.base import CompileOptions
from tilewright.compiler.targets.cuda.state import PagedState, sequence_bytes

KV = StateSpec("kv", PER_TOKEN, (2, 1, 16), "bf16")
OWN = (
    StateSpec("window", PER_SEQUENCE, (6, 3), "fp32"),
    StateSpec("memory", PER_SEQUENCE, (2, 4, 5), "fp32"),
)
PAGE_BYTES = 2 * 64 * 16 * 2


def make(own: tuple[StateSpec, ...] = OWN) -> PagedState:
    options = CompileOptions(max_batch=3, max_context=100)
    return PagedState([KV], options, torch.device("cpu"), sequence_specs=own)


def test_bytes() -> None:
    own = 4 * (6 * 3 + 2 * 4 * 5)
    state = make()
    assert sequence_bytes(OWN) == own == sum(each[0].nbytes for each in state.sequences.values())
    assert state.num_bytes(65) == 2 * PAGE_BYTES + own
    assert state.num_bytes_taken() == 0
    first, _ = state.reserve(10), state.reserve(80)
    assert state.num_bytes_taken() == 3 * PAGE_BYTES + 2 * own
    state.free(first)
    assert state.num_bytes_taken() == 2 * PAGE_BYTES + own
    assert make(()).num_bytes(65) == 2 * PAGE_BYTES


def test_a_copy_has_all_of_it_and_goes_its_own_way() -> None:
    state = make()
    handle = state.reserve(20)
    state.ran(handle, 7)
    for each in state.sequences.values():
        each[handle] = torch.randn(each.shape[1:])
    fresh = state.copy(handle, 7)
    assert state.length(fresh) == 7 and fresh != handle
    for each in state.sequences.values():
        assert torch.equal(each[fresh], each[handle])
        each[fresh] += 1
        assert not torch.equal(each[fresh], each[handle])


@pytest.mark.parametrize("count", [0, 6, 8])
def test_a_copy_of_another_length_is_refused(count: int) -> None:
    state = make()
    handle = state.reserve(20)
    state.ran(handle, 7)
    words = (
        f"a copy of the first {count} positions of a sequence of 7; allowed: all 7, since its "
        "state cannot be cut back"
    )
    with pytest.raises(RequestError) as caught:
        state.copy(handle, count)
    assert str(caught.value) == words and state.num_free() == 2


def test_without_such_state_a_copy_may_be_shorter() -> None:
    state = make(())
    handle = state.reserve(20)
    state.ran(handle, 7)
    assert state.length(state.copy(handle, 3)) == 3


def test_a_slot_s_length_begins_anew() -> None:
    state = make()
    handle = state.reserve(20)
    state.ran(handle, 7)
    state.free(handle)
    assert state.reserve(20) == handle and state.length(handle) == 0
