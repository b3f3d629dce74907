"""Slots of the cache: shapes, copies, and pages that go back to the system."""

from __future__ import annotations

import mmap
import os
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.targets.cpu.resident import PAGES, collected, resident_bytes
from tests.tiny import compiled, leave_slot, prefill, random_tokens, step, take_slot, tiny_model
from tilewright.compiler.targets.cpu.onnxruntime.cache import SlotCaches, SlotStates, padded_length
from tilewright.compiler.targets.cpu.onnxruntime.emitter import CacheSpec, SequenceState
from tilewright.compiler.targets.cpu.onnxruntime.executable import CpuExecutable
from tilewright.errors import CompileError

SPECS = (CacheSpec("a", 2, 16), CacheSpec("b", 3, 32))


def make(num_slots: int = 4, max_context: int = 600) -> SlotCaches:
    return SlotCaches(SPECS, num_slots, padded_length(SPECS, max_context))


def view(caches: SlotCaches, slot: int, index: int) -> np.ndarray:
    """Tensor ``index`` (a.key, a.value, b.key, b.value) of one slot, writable."""
    _, shape, address = caches.bindings(slot, slot + 1)[index]
    offset = address - caches._pages.address
    count = int(np.prod(shape)) * 4
    return caches._pages.bytes[offset : offset + count].view(np.float32).reshape(shape)


@given(
    st.lists(st.tuples(st.integers(1, 9), st.sampled_from([16, 48, 64, 80])), min_size=1),
    st.integers(1, 5000),
)
def test_slots_are_whole_pages_and_longer_than_the_context(
    sizes: list[tuple[int, int]], max_context: int
) -> None:
    specs = [CacheSpec("x", heads, dim) for heads, dim in sizes]
    length = padded_length(specs, max_context)
    assert length > max_context
    assert all(heads * length * dim * 4 % mmap.PAGESIZE == 0 for heads, dim in sizes)
    assert length - max_context <= mmap.PAGESIZE


def test_windows_of_slots_are_contiguous() -> None:
    caches = make()
    whole = caches.bindings(0, 4)
    assert [name for name, _, _ in whole] == ["a.key", "a.value", "b.key", "b.value"]
    for (_, shape, address), (_, part, inside) in zip(whole, caches.bindings(2, 4), strict=True):
        assert shape[0] == 4 and part == (2, *shape[1:])
        assert inside - address == 2 * int(np.prod(shape[1:])) * 4


def test_every_tensor_of_every_slot_is_its_own_memory() -> None:
    caches = make()
    for slot in range(4):
        for index in range(4):
            view(caches, slot, index)[:] = 10 * slot + index + 1
    for slot in range(4):
        for index in range(4):
            assert (view(caches, slot, index) == 10 * slot + index + 1).all()
    assert (caches._pages.bytes.view(np.float32) != 0).all(), "and together they are all of it"


def test_a_released_slot_reads_as_zeros_and_its_neighbours_stay() -> None:
    caches = make()
    caches._pages.bytes.view(np.float32)[:] = 1.0
    caches.release(1)
    for slot in range(4):
        for index in range(4):
            assert (view(caches, slot, index) == (slot != 1)).all()
    view(caches, 1, 0)[:] = 2.0
    assert (view(caches, 1, 0) == 2.0).all()


@pytest.mark.skipif(not PAGES.exists(), reason="needs Linux")
def test_pages_go_back_to_the_system() -> None:
    with collected():
        before = resident_bytes()
        caches = SlotCaches(SPECS, 4, padded_length(SPECS, 20_000))
        slot_bytes = sum(view(caches, 0, index).nbytes for index in range(4))
        assert resident_bytes() - before < slot_bytes / 4, "reserving touches no memory"
        for index in range(4):
            view(caches, 2, index)[:] = 1.0
        assert resident_bytes() - before > slot_bytes * 3 / 4
        caches.release(2)
        assert resident_bytes() - before < slot_bytes / 4


@pytest.mark.skipif(sys.platform != "linux", reason="address space is reserved otherwise")
def test_a_cache_may_be_larger_than_the_memory_while_it_is_empty() -> None:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    length = padded_length(SPECS, 1000)
    position = 4 * 2 * sum(spec.num_kv_heads * spec.head_dim for spec in SPECS)
    caches = SlotCaches(SPECS, 4 * memory // (length * position), length)
    view(caches, caches.num_slots - 1, 3)[:] = 1.0
    caches.release(caches.num_slots - 1)


def test_a_cache_that_no_memory_holds_is_refused_in_words() -> None:
    with pytest.raises(CompileError, match=r"for 1000000000 sequences of .*; allowed: fewer"):
        SlotCaches(SPECS, 1_000_000_000, padded_length(SPECS, 600))


def test_a_copy_is_of_the_first_positions() -> None:
    caches = make()
    for index in range(4):
        source = view(caches, 0, index)
        source[:] = np.random.default_rng(index).random(source.shape, dtype=np.float32)
    caches.copy(0, 3, 5)
    for index in range(4):
        source, target = view(caches, 0, index), view(caches, 3, index)
        assert (target[:, :, :5] == source[:, :, :5]).all()
        assert (target[:, :, 5:] == 0).all()
        assert (view(caches, 1, index) == 0).all()


PIECES = (
    SequenceState("a", (3, 8)),
    SequenceState("b", (2, 40, 50)),
    SequenceState("c", (5,)),
    SequenceState("d", (mmap.PAGESIZE,)),
)


def filled() -> SlotStates:
    """Four slots, in each piece ``10 * slot + piece + 1``."""
    states = SlotStates(PIECES, 4)
    for slot in range(4):
        values = [np.float32(10 * slot + index + 1) for index in range(4)]
        states.write(slot, [np.full(p.shape, v) for p, v in zip(PIECES, values, strict=True)])
    return states


def numbers(states: SlotStates, slot: int) -> list[set[float]]:
    return [set(piece.flatten().tolist()) for piece in states.read(slot)]


def test_every_piece_of_every_slot_is_its_own_memory() -> None:
    states = filled()
    for slot in range(4):
        assert numbers(states, slot) == [{10.0 * slot + index + 1} for index in range(4)]
    assert states.slot_bytes == 4 * (24 + 4000 + 5 + mmap.PAGESIZE)
    whole, part = states.bindings(0, 4), states.bindings(2, 4)
    assert [name for name, _, _ in whole] == ["a.state", "b.state", "c.state", "d.state"]
    for (_, shape, address), (_, inside, at), piece in zip(whole, part, PIECES, strict=True):
        assert (shape, inside) == ((4, *piece.shape), (2, *piece.shape))
        assert at - address == 2 * int(np.prod(piece.shape)) * 4


@pytest.mark.parametrize("slot", range(4))
def test_a_released_slot_of_states_is_zeros_and_its_neighbours_stay(slot: int) -> None:
    """Though their pages are shared."""
    states = filled()
    states.release(slot)
    for other in range(4):
        values = [10.0 * other + index + 1 for index in range(4)]
        assert numbers(states, other) == [{0.0 if other == slot else value} for value in values]


def test_a_copy_of_states_is_of_all_of_them() -> None:
    states = filled()
    states.copy(1, 3)
    assert numbers(states, 3) == numbers(states, 1) == [{11.0}, {12.0}, {13.0}, {14.0}]
    kept = states.read(3)
    states.release(3)
    assert all(piece.any() for piece in kept), "what is read is not the slot's memory"


def test_state_that_no_memory_holds_is_refused_in_words() -> None:
    huge = SequenceState("huge", (1 << 20, 1 << 10))
    with pytest.raises(
        CompileError, match=r"for 100000 sequences \(.*\); allowed: fewer sequences"
    ):
        SlotStates([huge], 100_000)


def test_freeing_a_sequence_clears_its_slot() -> None:
    executable = compiled(tiny_model(std=0.2), "cpu")
    assert isinstance(executable, CpuExecutable)
    kept, freed = take_slot(executable, 30), take_slot(executable, 30)
    for handle in (kept, freed):
        step(executable, [(handle, random_tokens(30), 0)])
    caches = executable._caches
    assert caches._pages.bytes.any()
    leave_slot(executable, freed)
    for _, shape, address in caches.bindings(freed, freed + 1):
        offset = address - caches._pages.address
        assert not caches._pages.bytes[offset : offset + int(np.prod(shape)) * 4].any()
    leave_slot(executable, kept)
    assert not caches._pages.bytes.any()
    assert prefill(executable, random_tokens(4)).shape == (4, 61)
