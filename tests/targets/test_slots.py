"""Slots and the executables that only count: null, and the reference's own limits."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.tiny import compiled, precision_of, random_tokens, step, tiny_model
from tilewright.compiler.errors import RequestError
from tilewright.compiler.ops import SamplingBatch
from tilewright.compiler.targets.base import StateHandle, StepInput
from tilewright.compiler.targets.null import NullExecutable
from tilewright.compiler.targets.slots import SlotPool


@given(st.integers(1, 6), st.lists(st.integers(-6, 6), max_size=40))
def test_a_pool_is_a_set_that_gives_the_lowest(num_slots: int, actions: list[int]) -> None:
    pool = SlotPool(num_slots, 10)
    taken: set[int] = set()
    for action in actions:
        if action < 0 and -action - 1 in taken:
            pool.free(StateHandle(-action - 1))
            taken.remove(-action - 1)
        elif action >= 0 and len(taken) < num_slots:
            expected = min(set(range(num_slots)) - taken)
            assert pool.reserve(action % 10 + 1) == expected
            taken.add(expected)
        elif action >= 0:
            with pytest.raises(RequestError, match=f"all {num_slots} sequences"):
                pool.reserve(1)
        assert pool.num_free() == num_slots - len(taken)
        assert all((slot in pool) == (slot in taken) for slot in range(num_slots))


@pytest.mark.parametrize("count", [0, -1, 11])
def test_sequences_that_do_not_fit_a_slot(count: int) -> None:
    pool = SlotPool(2, 10)
    with pytest.raises(RequestError, match=f"{count} positions; allowed: 1 to 10"):
        pool.reserve(count)
    assert pool.num_free() == 2


def test_a_slot_is_given_back_once() -> None:
    pool = SlotPool(2, 10)
    handle = pool.reserve(5)
    pool.free(handle)
    with pytest.raises(KeyError):
        pool.free(handle)


@pytest.fixture
def null() -> NullExecutable:
    executable = compiled(tiny_model(num_layers=1), "null", max_batch=3)
    assert isinstance(executable, NullExecutable)
    return executable


def test_null_gives_zeros_and_counts_steps(null: NullExecutable) -> None:
    handle = null.reserve(10)
    logits = step(null, [(handle, [1, 2, 3], 0)], rows=[0, 2])
    assert logits.shape == (2, 61)
    assert not logits.any()
    assert null.num_steps == 1
    assert null.memory().weights == 0


def test_null_reads_no_weights() -> None:
    model = tiny_model(num_layers=1)
    compiled(model, "null")
    assert model.checkpoint.reads == []


def test_null_checks_that_positions_follow(null: NullExecutable) -> None:
    a, b = null.reserve(10), null.reserve(10)
    step(null, [(a, [1, 2, 3], 0), (b, [1], 0)])
    step(null, [(b, [4], 1), (a, [4, 5], 3)])
    with pytest.raises(AssertionError, match="state expects"):
        step(null, [(a, [1], 4)])
    with pytest.raises(AssertionError, match="state expects"):
        step(null, [(b, [1, 1], 3)])


def test_null_lengths_follow_copies_and_frees(null: NullExecutable) -> None:
    handle = null.reserve(10)
    step(null, [(handle, [1, 2, 3, 4], 0)])
    fresh = null.copy(handle, 2)
    step(null, [(fresh, [9], 2), (handle, [5], 4)])
    null.free(handle)
    assert null.num_free() == 2
    assert null.reserve(5) == handle
    step(null, [(handle, [1], 0)])
    empty = null.copy(fresh, 0)
    step(null, [(empty, [1], 0)])
    with pytest.raises(RequestError, match="all 3 sequences"):
        null.copy(fresh, 1)


def test_null_samples_the_first_token(null: NullExecutable) -> None:
    handle = null.reserve(10)
    one = torch.zeros(1).long()
    batch = SamplingBatch(torch.zeros(1), one, torch.ones(1), one, one, torch.tensor([[5, 0]]))
    inputs = StepInput(one, one, torch.tensor([0, 1]), one, (handle,), batch)
    output = null.step(inputs)
    assert output.token_ids is not None and output.finished is not None
    assert (output.token_ids.tolist(), output.finished.tolist()) == ([0], [True])
    assert output.logits is None


def test_the_reference_mixes_phases_in_one_step() -> None:
    executable = compiled(tiny_model(std=0.2), precision=precision_of("bfp8"))
    assert executable.capabilities.mixed_steps
    assert executable.capabilities.max_prefill_sequences == 4
    prompts = [random_tokens(count, seed=count) for count in (6, 3)]
    a, b = (executable.reserve(20) for _ in prompts)
    step(executable, [(a, prompts[0], 0)])
    mixed = step(executable, [(b, prompts[1], 0), (a, [7], 6)])
    c, d = (executable.reserve(20) for _ in prompts)
    alone = torch.cat(
        [
            step(executable, [(c, prompts[1], 0)]),
            step(executable, [(d, [*prompts[0], 7], 0)]),
        ]
    )
    torch.testing.assert_close(mixed, alone, atol=1e-5, rtol=1e-5)


def test_the_reference_counts_its_memory() -> None:
    model = tiny_model()
    executable = compiled(model, max_batch=2, max_context=10)
    numbers = sum(tensor.numel() for tensor in model.checkpoint.tensors.values()) + 8
    memory = executable.memory()
    tied = model.checkpoint.tensors["model.embed_tokens.weight"].numel()
    assert memory.weights in (4 * numbers, 4 * (numbers + tied))
    assert memory.state == 2 * 4 * (2 * 2 * 10 * 2 * 16)
    a, b = executable.reserve(10), executable.reserve(10)
    with pytest.raises(RequestError, match="all 2 sequences are in use"):
        executable.copy(a, 1)
    executable.free(b)
    assert executable.num_free() == 1
