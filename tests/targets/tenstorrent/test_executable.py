"""The emulated board behind the narrow waist: bits that no batch, chunk or neighbour changes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.targets.tenstorrent.boards import board_precision, emulated, programs
from tests.tiny import copy_slot, leave_slot, prefill, random_tokens, step, take_slot, tiny_model
from tilewright.compiler.mesh import Mesh
from tilewright.compiler.targets.interface.base import CompileOptions, Executable

MESHES = {"1x1": Mesh(), "4x2": Mesh(4, 2)}
MODEL = tiny_model(std=0.2, hidden_size=64)


@pytest.fixture(scope="module", params=MESHES)
def executable(request: pytest.FixtureRequest) -> Executable:
    return emulated(MODEL, MESHES[request.param])


def test_what_it_says_of_itself(executable: Executable) -> None:
    able = executable.capabilities
    assert (able.max_num_seqs, able.max_context) == (4, 64)
    assert (able.page_size, able.max_prompts, able.runs_ahead) == (0, 1, False)
    assert (executable.vocab_size, executable.device_name) == (61, "N150")
    assert str(executable.device_detail).startswith("emulated on ")


@settings(max_examples=8)
@given(st.lists(st.integers(2, 9), min_size=1, max_size=4))
def test_chunks_of_a_prompt_are_the_whole_bit_for_bit(
    executable: Executable, sizes: list[int]
) -> None:
    """Chunks of one token are decode steps, whose formats and fidelities are others."""
    tokens = random_tokens(sum(sizes) + 2, seed=sum(sizes))
    assert torch.equal(prefill(executable, tokens, sizes), prefill(executable, tokens))


def test_a_row_of_a_batch_is_as_alone_bit_for_bit(executable: Executable) -> None:
    prompts = [random_tokens(count, seed=count) for count in (5, 33, 17, 9)]
    tails = [random_tokens(3, seed=100 + index) for index in range(4)]
    alone = [
        prefill(executable, prompt + tail, [len(prompt), 1, 1])[-3:]
        for prompt, tail in zip(prompts, tails, strict=True)
    ]
    handles = [take_slot(executable, 40) for _ in prompts]
    for handle, prompt in zip(handles, prompts, strict=True):
        step(executable, [(handle, prompt, 0)])
    for at, order in enumerate(([0, 1, 2, 3], [3, 1, 0, 2], [2, 3, 1, 0])):
        work = [(handles[i], tails[i][at : at + 1], len(prompts[i]) + at) for i in order]
        logits = step(executable, work)
        for row, i in enumerate(order):
            assert torch.equal(logits[row], alone[i][at])
    for handle in handles:
        leave_slot(executable, handle)


def test_rooms_do_not_change_bits() -> None:
    """Of the batch and the context a board is compiled for, up to a row of tiles."""
    tokens = random_tokens(9)
    found = [
        prefill(emulated(MODEL, options=options), tokens, [6, 1, 1])
        for options in (
            CompileOptions(max_batch=1, max_context=40),
            CompileOptions(max_batch=32, max_context=64),
        )
    ]
    assert torch.equal(found[0], found[1])


def test_operations_on_state_leave_no_trace(executable: Executable) -> None:
    """Sequences come, are copied and go beside one whose bits stay."""
    tokens = random_tokens(16)
    expected = prefill(executable, tokens, [12, 1, 1, 1])
    memory = executable.memory()
    handle = take_slot(executable, 20)
    parts = [step(executable, [(handle, tokens[:12], 0)], rows=range(12))]
    for at in (12, 13, 14, 15):
        other = take_slot(executable, 9)
        step(executable, [(other, random_tokens(7, seed=at), 0)])
        copied = copy_slot(executable, handle, at)
        step(executable, [(copied, [3, 1, 4, 1], at)])
        leave_slot(executable, other)
        parts.append(step(executable, [(handle, tokens[at : at + 1], at)]))
        leave_slot(executable, copied)
    leave_slot(executable, handle)
    assert torch.equal(torch.cat(parts), expected)
    assert executable.memory() == memory


def test_a_copy_has_the_past_bit_for_bit(executable: Executable) -> None:
    prompt, tail = random_tokens(9), random_tokens(4, seed=3)
    handle = take_slot(executable, 20)
    step(executable, [(handle, [*prompt, 8, 8], 0)])
    fresh = copy_slot(executable, handle, len(prompt))
    leave_slot(executable, handle)
    got = step(executable, [(fresh, tail, len(prompt))], rows=range(4))
    leave_slot(executable, fresh)
    assert torch.equal(got, prefill(executable, prompt + tail, [9])[-4:])


def test_memory_is_what_the_board_holds(executable: Executable) -> None:
    """Whole pages of all chips: what 64 positions of four sequences take is all the state."""
    memory = executable.memory()
    assert executable.state_bytes(64) * 4 == memory.state
    assert executable.state_bytes(1) == executable.state_bytes(32) == memory.state // 8
    mesh = MESHES["1x1"] if executable.state_bytes(1) == 8704 else MESHES["4x2"]
    _, decode = programs(MODEL, mesh)
    assert memory.weights == mesh.num_chips * sum(each.num_bytes for each in decode.weights)


def test_a_closed_executable_lets_its_caches_go() -> None:
    executable = emulated(tiny_model(num_layers=1), precision=board_precision("bf16"))
    executable.close()
    handle = take_slot(executable, 4)
    with pytest.raises(KeyError):
        step(executable, [(handle, [1, 2], 0)])
